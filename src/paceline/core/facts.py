"""What a part says of itself, so that parts can be told to go together or not.

A part `gives` facts about its axis, `needs` facts of the others and `refuses` some. The job adds facts about its
optimizer. They are an enum: a fact that is misspelt is an AttributeError, not a check that never runs.
"""

from __future__ import annotations

from enum import Enum


class Fact(Enum):
    """One fact. Its value is how error messages and the documentation say it."""

    # Of reducers.
    EXACT_MEAN = "exact mean"  # the mean is the mean, to rounding
    CLOSE_MEAN = "close mean"  # the mean to within the rounding of its elements, so that its norm is the mean's
    UNBIASED = "unbiased"  # the mean is right on average
    ELEMENTWISE = "elementwise"  # an element's mean depends on its place only, so a bucket can travel in chunks
    WHOLE_MATRICES = "whole matrices"  # it looks at gradients as matrices
    LEFTOVER = "leftover"  # something is not sent, and is given back as `Reduced.left`
    KEEPS_LEFTOVERS = "keeps leftovers"  # something of one step's gradients is carried into the next
    CORRECTS_ITSELF = "corrects itself"  # it carries its own leftovers

    # Of syncs.
    REPLICAS_AGREE = "replicas agree"  # all workers have the same weights after every step
    GRADIENTS_AGREE = "gradients agree"  # all workers step by the same gradients, those of this step
    DIFFERENCES = "differences"  # what is averaged are differences of weights, not gradients

    # Of layouts.
    WHOLE_GRADIENTS = "whole gradients"
    WHOLE_PARAMETERS = "whole parameters"
    GATHERS_IN_FORWARD = "gathers in forward"  # parameters are gathered from all workers whenever a module computes

    # Of the job's optimizer.
    SGD = "optimizer:SGD"
    MOMENTUM = "optimizer:momentum"  # an SGD with momentum
    ADAM = "optimizer:adam"  # Adam or AdamW without amsgrad

    @property
    def of_optimizer(self) -> bool:
        """Is it known only when there is a job, with its optimizer?"""
        return self.value.startswith("optimizer:")
