"""MoTE: text-embedding models with one feed-forward expert per task."""

from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote.upcycling import UpcyclingPlan, plan_upcycling, upcycle

__all__ = ["MoTEConfig", "MoTEModel", "UpcyclingPlan", "plan_upcycling", "upcycle"]
