"""KL to a reference policy, in the reward or in the loss, and the keys of terms against a collapse of the entropy."""
