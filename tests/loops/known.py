"""Cells that fail and are known to: (loops, methods) -> why, both as patterns. The aim is that nothing stands here."""

from __future__ import annotations

from fnmatch import fnmatchcase

_UNANNOUNCED = "a gradient that no hook announced is not exchanged"
_CROSSED = "what is done between backward and the next forward meets an update under way"
_PARTIAL = "a second backward that reaches some parameters only"
_RAISED = "parts of a backward that raised reach the next step"
_WRITTEN = "consensus() does not know what the user wrote into the weights after the last step"
_SHARED = "one Method object in two calls of prepare: the engines share its parts"
_LAST_BATCH = "the batch handed out last decides the weight of the one whose backward comes first"
_NOT_FINISHED = "a micro-batch that has no backward counts nothing: a round goes by what was finished"
_UNLIKE = "replicas that differ from outside are not noticed"
_MEMORY = "outside of a forward a parameter is memory that was never written: reads are wrong, writes a raw error"

_BY_HAND = "autograd_grad autograd_grad_added autograd_grad_of_some autograd_grad_clipped autograd_grad_every_other"
_CROSSING = """
    zero_between_backwards backward_without_step step_twice zero_grad_of_model grad_none_by_hand grad_zeroed_by_hand
    clip_by_hand grads_scaled grads_sign gradient_noise grads_clamped grads_replaced grads_centred grads_in_foreach
    grads_dropped grads_dropped_once grads_kept_aside grads_as_vector ema_averaged_model ema_lerp ema_swapped_in swa
    weights_clamped weights_clamped_by_data weights_normalised data_replaced weights_reset copy_trained
    weight_norm_old parametrized_later weights_logged parameters_as_vector sam_by_hand lookahead_around
    inner_prepared_wrapper_kept optimizer_reset optimizer_made_anew scaler_unknown_fp32
    scaler_unknown_overflow_on_one batch_norm_accumulated gan gan_two_prepares wgan_clipped actor_critic to_bfloat16
    weights_used_directly adapters_merged soft_target momentum_encoder two_phases compiled_after
"""
_READS_WEIGHTS = """
    soft_target momentum_encoder ema_* target_network swa copy_trained data_replaced weights_* weight_norm_old
    l2_by_hand parameters_as_vector lookahead_around optimizer_made_anew adapters_merged two_phases
"""


def _all(loops: str, columns: str, why: str) -> dict[tuple[str, str], str]:
    return {(name, column): why for name in loops.split() for column in columns.split()}


KNOWN: dict[tuple[str, str], str] = {
    **_all(_BY_HAND + " functional_grad", "*", _UNANNOUNCED),
    **_all(_CROSSING, "priority", _CROSSED),
    **_all("backwards_of_* checkpointed_reentrant", "zero*", _PARTIAL),
    **_all("backward_raises* second_backward_raises tried_again_on_one", "*", _RAISED),
    **_all("weights_* lookahead_around wgan_clipped state_dict_loaded*", "*local_sgd* diloco slowmo", _WRITTEN),
    **_all("two_prepares gan_two_prepares loss_over_two_prepares", "*", _SHARED),
    **_all("fetched_ahead_uneven two_loaders_zipped_uneven validated_uneven", "*", _LAST_BATCH),
    **_all("forward_raises_on_one", "any_batch*", _NOT_FINISHED),
    **_all("weights_reset_differently state_dict_loaded_on_one", "*", _UNLIKE),
    **_all("rate_differs plateau_on_own", "*", "learning rates that differ between the workers are not noticed"),
    **_all(_READS_WEIGHTS, "zero3*", _MEMORY),
    **_all(
        "layer_swapped parameter_replaced", "*", "a parameter replaced in its group is not seen by the next backward"
    ),
    **_all("to_double to_bfloat16", "*", "the model is cast after prepare"),
    **_all("model_pickled", "*", "hooks that do not pickle"),
    **_all("lbfgs", "*", "the refusal does not say what to do"),
    **_all("sam sam_closure sam_by_hand", "*", "optimizers that do not come through step(), and closures"),
    **_all("inner_prepared_wrapper_kept optimizer_inside", "*", "a step that was bound before prepare"),
    **_all("step_in_backward", "*", "an optimizer that steps in the middle of a backward"),
    **_all("batch_norm_nan_on_one", "*", "running statistics keep the NaN of a step that did not count"),
    **_all("batch_norm_two_forwards gan_losses_first", "*", "statistics are averaged in place between two backwards"),
    **_all("scaler_overflow_on_one scaler_unknown*", "*", "loss scales of workers that step alone"),
    **_all("own_buffer", "*", "a buffer that a module writes from its own share drifts apart"),
    **_all("lazy_module", "*", "parameters without a shape are not refused"),
    **_all("grads_via_numpy", "zero*", "a raw error of torch in place of a refusal"),
}


def line(loop: str, column: str) -> tuple[str, str] | None:
    """The first line that names this cell."""
    return next((key for key in KNOWN if fnmatchcase(loop, key[0]) and fnmatchcase(column, key[1])), None)


def known(loop: str, column: str) -> str:
    """Why this cell fails, if that is known."""
    found = line(loop, column)
    return KNOWN[found] if found else ""
