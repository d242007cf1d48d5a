"""KL to a reference policy, in the reward or in the loss, and the keys of terms that hold up the entropy."""
