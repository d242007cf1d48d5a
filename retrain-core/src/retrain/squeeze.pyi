"""The names of `retrain.squeeze`, each with its home; `squeeze.py` reads this file."""

from retrain.tools.squeeze.compress import CompressedAdapter as CompressedAdapter
from retrain.tools.squeeze.compress import compress_adapter as compress_adapter
from retrain.tools.squeeze.job import auto_squeeze as auto_squeeze
from retrain.tools.squeeze.spectrum import SqueezeAnalysis as SqueezeAnalysis
from retrain.tools.squeeze.spectrum import analyze_adapter as analyze_adapter
