"""How many samples each worker takes, and how large a step is."""

from mutants.mutant import Mutant

ROWS = [
    Mutant(
        "a small last batch must give everyone the least",
        "balances/measured.py",
        "least = min(self.least, batch // len(speeds))",
        "least = self.least",
        "unit/test_balances.py",
    ),
    Mutant(
        "a worker's memory is no bound",
        "balances/measured.py",
        "min(speed.most, self.most or batch)",
        "self.most or batch",
        "unit/test_balances.py",
    ),
    Mutant(
        "what is left over goes to who is done now",
        "balances/measured.py",
        "[(speed.seconds(b + 1), rank)",
        "[(speed.seconds(b), rank)",
        "unit/test_balances.py::test_the_last_samples_go_to_who_is_done_with_them_first",
    ),
    Mutant(
        "what a step costs is shared out too",
        "balances/measured.py",
        "int(max(time - speed.per_step, 0.0) / speed.per_sample)",
        "int(time / speed.per_sample)",
        "unit/test_balances.py",
    ),
    Mutant(
        "any gain is worth it",
        "balances/measured.py",
        "return before_s - after_s > self.gain * before_s",
        "return before_s > after_s",
        "laws/test_balance.py::test_noise_alone_moves_nothing",
    ),
    Mutant(
        "a step is counted against one batch",
        "balances/_step_size.py",
        "return max(size.multiple / self.low, 1.0)",
        "return max(size.multiple, 1.0)",
        "laws/test_step_size.py::test_a_step_counts_against_the_smallest",
    ),
    Mutant(
        "a large step is one step of the schedule",
        "balances/_step_size.py",
        "    def counts(self, size: StepSize) -> float:\n        return self._grown(size)",
        "    def counts(self, size: StepSize) -> float:\n        return 1.0",
        "laws/test_step_size.py::test_a_step_counts_against_the_smallest",
    ),
    Mutant(
        "windows share their norms",
        "balances/accordion_batch.py",
        '            self.state["squares"], self.state["heard"] = 0.0, 0\n',
        "",
        "laws/test_step_size.py::test_small_batches_until_the_norm_rests",
    ),
    Mutant(
        "a batch that has grown shrinks again",
        "balances/accordion_batch.py",
        '            if not regime.critical:\n                self.state["multiple"] = self.high\n',
        '            self.state["multiple"] = self.low if regime.critical else self.high\n',
        "laws/test_step_size.py::test_small_batches_until_the_norm_rests "
        "laws/test_step_size.py::test_a_fall_of_the_rate_keeps_them_small",
    ),
    Mutant(
        "the batch changes in every step",
        "balances/adaptive_batch.py",
        "held < self.hold or ",
        "",
        "laws/test_step_size.py::test_the_batch_follows_the_noise_scale_within_its_bounds",
    ),
    Mutant(
        "an epoch's short last step decides",
        "balances/adaptive_batch.py",
        " or size.multiple != m:",
        ":",
        "laws/test_step_size.py::test_an_epochs_short_last_step_changes_no_batch",
    ),
    Mutant(
        "a batch is halved as soon as it is above the noise scale",
        "balances/adaptive_batch.py",
        "if self.slack * wanted < size.samples:",
        "if wanted < size.samples:",
        "laws/test_step_size.py::test_the_batch_follows_the_noise_scale_within_its_bounds",
    ),
    Mutant(
        "a halved batch may fall below the least",
        "balances/adaptive_batch.py",
        "max(math.ceil(m / 2), self.low)",
        "math.ceil(m / 2)",
        "laws/test_step_size.py::test_the_batch_follows_the_noise_scale_within_its_bounds",
    ),
    Mutant(
        "adascale's steps count by their batches",
        "balances/adascale.py",
        "return self.rate(size)",
        "return size.multiple",
        "laws/test_step_size.py::test_adascale_multiplies_by_the_gain_of_its_paper",
    ),
    Mutant(
        "adascale's gain is against the whole step",
        "balances/adascale.py",
        "self.base or size.samples / size.units",
        "self.base or size.samples",
        "laws/test_step_size.py::test_adascale_multiplies_by_the_gain_of_its_paper",
    ),
]
