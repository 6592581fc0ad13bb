"""Cells that fail and are known to: (loops, methods) -> why, both as patterns. The aim is that nothing stands here."""

from __future__ import annotations

from fnmatch import fnmatchcase

_COPIES = (
    *("adapters_merged", "copy_trained", "ema_*", "momentum_encoder", "soft_target", "state_dict_in_mid_step"),
    *("swa", "target_network"),
)
_COPY = "a copy or an average that a worker makes of its own weights is its own; consensus() knows the model's alone"
_LOSSES = "a loss that is evaluated outside of consensus() is of a worker's own weights"
_MOVED = "how far a worker's own weights have moved is no mean; the method has no exact limit"
_HOGWILD = "each worker's step is one of its own, so the weights go W times as far at the same rate"
_ONE_SET = "there is one set of weights, and each worker writes into it"
_CENTRE = "what is written into replicas reaches the centre, which consensus() shows, by their mean and step by step"
_ROUNDING = "a bias before BatchNorm has no gradient but rounding errors, of which Adam makes whole steps"
_PLAIN = "plain Adam raises an error here"

KNOWN: dict[tuple[str, str], str] = {
    ("gan", "measured"): "paceline.mean of a loss counts every worker once, and shares are no halves",
    ("batch_norm*", "measured"): "each worker normalizes by its own samples, and shares are no halves",
    (
        "scaler_overflow_on_one",
        "hogwild",
    ): "no worker waits for another in any step, so each has a loss scale of its own",
    ("forward_raises_on_one", "any_batch*"): "a micro-batch without a backward counts nothing in a round",
    ("backward_raises_on_one*", "any_batch*"): "a micro-batch without a backward counts nothing in a round",
    **{(loop, column): _COPY for column in ("gossip_lowbit", "hogwild", "sma") for loop in _COPIES},
    **{
        (loop, column): _LOSSES
        for column in ("gossip_lowbit", "hogwild", "sma")
        for loop in ("fused*", "transformer_ev*")
    },
    **{("weights_logged", column): _MOVED for column in ("gossip_lowbit", "hogwild", "sma")},
    **{(loop, "hogwild"): _HOGWILD for loop in ("adagrad", "complex_weights", "loss_with_parameters", "wgan_clipped")},
    **{(loop, "hogwild"): _ONE_SET for loop in ("weights_copied_back", "weights_reset_differently")},
    **{(loop, "sma"): _CENTRE for loop in ("weights_c*", "weights_reset", "wgan_clipped")},
    **{
        (loop, column): _ROUNDING
        for column in ("onebit_adam", "qadam")
        for loop in ("batch_norm_*", "gan_losses_first")
    },
    **{(loop, column): _PLAIN for column in ("onebit_adam", "qadam") for loop in ("sparse_embedding", "to_bfloat16")},
}


def line(loop: str, column: str) -> tuple[str, str] | None:
    """The first line that names this cell."""
    return next((key for key in KNOWN if fnmatchcase(loop, key[0]) and fnmatchcase(column, key[1])), None)


def known(loop: str, column: str) -> str:
    """Why this cell fails, if that is known."""
    found = line(loop, column)
    return KNOWN[found] if found else ""
