"""LoRA-Squeeze: the rank that an adapter needs, and the same adapter at a smaller rank.

Import `analyze_adapter`, `compress_adapter` and `auto_squeeze` from here; each is loaded on first use.
"""

from retrain.kernel.lazy_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
