"""The names of `retrain`, each with its home; `__init__.py` reads this file."""

from retrain.facade.comparison import Comparison as Comparison
from retrain.facade.comparison import compare as compare
from retrain.facade.run import Run as Run
from retrain.facade.run import RunStopped as RunStopped
from retrain.facade.run import load as load
from retrain.facade.run import train as train

__version__: str
__distribution__: str
