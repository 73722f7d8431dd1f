"""`import mote.auto` registers all kinds of MoTE with Transformers: `AutoModel` & co. open them by the installed code.

So they need no `trust_remote_code`, and other processes find the classes of pickled models by their names. The code in
a model's folder or repository is not run then, not even with `trust_remote_code=True`.
"""

import logging

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.dynamic_module_utils import init_hf_modules

from mote.checkpoints.reading import MOTE_CLASSES, mote_class

for model_type, classes in MOTE_CLASSES.items():
    config_class = mote_class(model_type, "config")
    AutoConfig.register(model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, mote_class(model_type, "model"), exist_ok=True)
    if len(classes) > 2:
        AutoModelForMaskedLM.register(config_class, mote_class(model_type, "masked_lm"), exist_ok=True)
init_hf_modules()  # models that were opened by their own code, and pickled, are found by it
logging.getLogger(__name__).info("MoTEs are opened by the installed code, not by that in their folders")
