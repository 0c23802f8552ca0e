"""Adapters: small parameters beside a frozen model, as PEFT has them.

Each kind is a file: which parameters it has on a layer, and what they make of the layer.
"""

from odtpack.adapters.insert import Inserted, insert_adapter
from odtpack.spec import AdapterSpec

__all__ = ["AdapterSpec", "Inserted", "insert_adapter"]
