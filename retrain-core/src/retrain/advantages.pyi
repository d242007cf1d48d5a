"""The names of `retrain.advantages`, each with its home; `advantages.py` reads this file."""

from retrain.credit.algorithm import train_rows as train_rows
from retrain.credit.public import amplify_planning as amplify_planning
from retrain.credit.public import compute_composable_advantages as compute_composable_advantages
from retrain.credit.public import gtpo_weights as gtpo_weights
from retrain.credit.public import top_rho_threshold as top_rho_threshold
from retrain.credit.specs import AdvantageContext as AdvantageContext
from retrain.credit.specs import AdvantageSpec as AdvantageSpec
from retrain.credit.specs import AlgorithmSpec as AlgorithmSpec
from retrain.credit.specs import CreditStage as CreditStage
from retrain.credit.specs import StepAdvantageContext as StepAdvantageContext
from retrain.credit.specs import TokenAdvantageContext as TokenAdvantageContext
from retrain.credit.specs import TransformContext as TransformContext
from retrain.credit.specs import TransformOutput as TransformOutput
from retrain.credit.specs import TransformSpec as TransformSpec
from retrain.credit.specs import UncertaintyContext as UncertaintyContext
from retrain.credit.specs import UncertaintySpec as UncertaintySpec
from retrain.kernel.contracts.algorithm import Algorithm as Algorithm
from retrain.kernel.contracts.algorithm import Credit as Credit
from retrain.kernel.contracts.algorithm import Needs as Needs
from retrain.kernel.contracts.algorithm import TokenCredit as TokenCredit
from retrain.kernel.types import GroupStatus as GroupStatus
from retrain.kernel.types import Turns as Turns
from retrain.kernel.types import group_status as group_status
