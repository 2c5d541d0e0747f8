"""Evaluates the timeline of the controller: who waited when and for what, who worked, and what slows a training."""
