"""The five conditions of the SEPA paper, as plugins of retrain: grpo, maxrl, gtpo, gtpo_hicra, gtpo_sepa."""

__version__ = "0.1.0"
