"""Models of any architecture behind one contract (`retrain_local.decoder`), their adapters and their files.

Begin with `load.py`, the one door. Another model like Llama is an entry of `architecture.FAMILIES`. A decoder of a
different form implements `TrainedDecoder` and gets a branch in `load.create_pair`. All others go through `hf_model.py`.
"""
