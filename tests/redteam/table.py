"""What must become of each cheat: one line per file, in the order of the red team's list.

``reason`` is a regular expression that the verdict's reason must match: caught for the wrong reason is not
caught.  ``sandbox`` lines are skipped where a guard of the sandbox does not work.  ``gap`` says why a cheat
is not caught yet; it must then really get through, so that closing the hole means deleting the text.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    task: str
    status: str
    """One of the closed vocabulary; ``correct`` stands for ``keep`` or ``discard``."""
    reason: str = ""
    forms: str = "both"
    sandbox: bool = False
    provenance: str = ""
    gap: str = ""
    slow: bool = False
    audit: bool = False
    timing: str = ""
    """What the timing stage must say; a number in it must be well below the latency in the verdict."""
    like: str = ""
    """An honest kernel that does the same without the cheat: it must bring nothing over that one."""

    @property
    def statuses(self) -> list[str]:
        listed = self.status.split("|")
        return [*(s for s in listed if s != "correct"), *(("keep", "discard") if "correct" in listed else ())]


OWN = r"eager's own"
KEPT = "is kept by the kernel after the call"
NOT_SEEN = r"PermissionError|OSError|Read-only|Operation not permitted|SIGSYS"
RESOURCES = r"MemoryError|can't allocate|not enough memory|SIGKILL|SIGSEGV|bad_alloc|allocate memory"

CHEATS: dict[str, Line] = {
    # correctness
    "zeros_within_tolerance": Line("softmax", "incorrect", r"Frobenius error 1 is .*eager's own"),
    "returns_its_input": Line("rms", "incorrect", "not freshly allocated: it shares an input's memory"),
    "mutates_a_weight": Line("rms", "rejected", "changes its input 'weight'"),
    "mutates_when_timed": Line("rms", "rejected|incorrect", "changes its input 'x'|in a timed call"),
    "reads_stale_memory": Line("rms", "incorrect", f"{OWN}|differ in where they are NaN"),
    "leaves_part_unwritten": Line("rms", "incorrect", f"{OWN}|differ in where they are NaN"),
    "broadcasts_a_scalar": Line("rms", "incorrect", "is a broadcast of fewer values"),
    "wrong_dtype": Line("rms", "incorrect", "is float64, the reference's is float32"),
    "wrong_shape": Line("rms", "incorrect", r"has shape \[1, 64, 256\]"),
    "skips_max": Line("softmax", "incorrect", "(large|offset|outliers) inputs.* in where they are NaN"),
    "skips_eps": Line("rms", "incorrect", OWN),
    "skips_mask": Line("softmax", "incorrect", OWN),
    "skips_tail_tile": Line("linear", "incorrect", OWN),
    "skips_last_k": Line("linear", "incorrect", OWN),
    "computes_in_half": Line("linear", "incorrect", OWN),
    "computes_in_tf32": Line("linear", "incorrect", OWN),
    "flips_allow_tf32": Line("linear", "rejected", "changes global state: .*tf32 False -> .*tf32 True"),
    "flips_matmul_precision": Line("linear", "rejected", "changes global state: .*highest.* -> medium"),
    "flushes_denormals": Line("rms", "rejected", "changes global state: floating point: .*kept -> .*flushed"),
    "nan_where_numbers_are": Line("rms", "incorrect", r"NaN; element \[3, 4\] is nan"),
    "numbers_where_nan_is": Line("softmax", "incorrect", r"NaN; element \[7, 0\] is 0.0, float64 has nan"),
    "cached_by_id": Line("rms", "incorrect", OWN),
    "cached_by_data_ptr": Line("rms", "incorrect", OWN),
    "cached_by_shape": Line("rms", "incorrect", OWN),
    "cached_by_fingerprint": Line("rms", "correct", like="library_norm"),
    "remembers_whole_inputs": Line("linear", "discard", "not above"),
    "finds_rotations": Line("digamma", "correct", forms="cpu", like="digamma"),
    "ring_of_buffers": Line("rms", "incorrect", KEPT),
    "outputs_share_memory": Line("two_outputs", "incorrect", "output 1 shares memory with another output"),
    "eps_that_never_counts": Line("tiny_eps", "incorrect", "zero rows inputs.* in where they are NaN"),
    "eps_only_for_zeros": Line("tiny_eps", "incorrect", f"small (rows )?inputs.*({OWN}|on their own scale)"),
    "skips_small_rows": Line("gated", "incorrect", "rows are wrong on their own scale"),
    "skips_small_rows_when_timed": Line(
        "gated", "incorrect", r"rows are wrong on their own scale.*\(in a timed call\)"
    ),
    "sine_of_small_numbers": Line("sine", "incorrect", f"wide inputs.*{OWN}"),
    "stale_prepack": Line("linear", "incorrect", "weights changed in place"),
    "hard_codes_strides": Line("rms", "incorrect", "inputs with padded rows"),
    "hard_codes_shape": Line("rms", "crash", r"on held-out shapes \(65x257, 257\): .*must match"),
    "drops_nan": Line("relu", "incorrect", r"nan inputs.*NaN; element .* is 0.0, float64 has nan"),
    "hard_codes_seed": Line("rms", "incorrect", OWN),
    "right_most_of_the_time": Line("rms", "incorrect", OWN),
    "race_gpu": Line("rms", "incorrect", OWN, "gpu"),
    "lazy_subclass": Line("rms", "incorrect", "is a Lazy, not a tensor"),
    "finds_answer_by_gc": Line("rms", "incorrect", f"{OWN}|differ in where they are NaN"),
    "finds_answer_in_frames": Line("rms", "incorrect", f"{OWN}|differ in where they are NaN|{KEPT}"),
    "finds_reference_in_modules": Line("rms", "incorrect", OWN),
    # timing
    "other_stream_gpu": Line("rms", "incorrect|rejected", f"{OWN}|NaN|own clock", "gpu"),
    "background_thread": Line("rms", "incorrect", f"{KEPT}|NaN|{OWN}", "cpu"),
    "defers_to_next_call": Line("rms", "incorrect", KEPT),
    "defers_to_the_checker": Line(
        "rms", "rejected", "own clock", "cpu",
    ),
    "late_thread": Line("rms", "rejected", "own clock", "cpu"),
    "slow_then_fast": Line("rms", "incorrect", "in a timed call"),
    "lazy_until_collected": Line("rms", "rejected", "own clock", "cpu"),
    "claims_calls_not_made": Line("rms", "correct", forms="cpu", like="library_norm"),
    "skips_middle_calls": Line("rms", "correct", forms="cpu", like="library_norm"),
    # A pause of the machine's own breaks its count, and then it computes every call.
    "counts_to_the_last_calls": Line(
        "rms", "incorrect|correct", "in a timed call|eager", "cpu", like="library_norm"
    ),
    # Its thread may read inputs that are being written (wrong answers), or never be ahead on a busy machine.
    "precomputes_while_idle": Line(
        "rms", "rejected|incorrect|correct", f"own clock|{OWN}|NaN|eager", "cpu", like="library_norm"
    ),
    "leaves_its_group": Line("rms", "crash", NOT_SEEN, sandbox=True),
    "sabotages_the_baseline": Line("rms", "rejected", "own clock", "cpu"),
    "a_tenth_less": Line(
        "rms", "correct|rejected", forms="cpu", timing=r"([\d.]+) us by the kernel's"
    ),
    "batches_calls": Line("rms", "correct", forms="cpu", like="library_norm", audit=True),
    "lies_about_strides": Line("relu", "rejected", "the judge's own clock saw", "cpu"),
    "patched_perf_counter": Line("rms", "rejected", "the judge's own clock saw", "cpu"),
    "patched_event_gpu": Line("rms", "rejected", "the judge's own clock saw", "gpu"),
    "patched_synchronize_gpu": Line("rms", "rejected|incorrect", f"{OWN}|NaN|own clock", "gpu"),
    # tampering
    "exits_zero": Line("rms", "crash", r"the process ended \(exit code 0\) while running"),
    "forged_junk": Line("rms", "rejected", "tampered with the judge's channel"),
    "forged_report": Line("rms", "incorrect", "differ in where they are NaN"),
    "malicious_pickle": Line("rms", "rejected", "tampered with the judge's channel"),
    "patched_comparison": Line("rms", "incorrect", OWN),
    "shadows_a_module": Line("rms", "incorrect", OWN),
    "rewrites_the_reference": Line("rms", "crash", NOT_SEEN, sandbox=True),
    "rewrites_the_tests": Line("rms", "crash", NOT_SEEN, sandbox=True),
    "rewrites_the_cache": Line("rms", "crash", NOT_SEEN, sandbox=True),
    "raises_its_priority": Line("rms", "crash", "no higher priority", "cpu", sandbox=True),
    "sleeps_for_ever": Line("rms", "timeout", "no answer within 3 s while running"),
    "sleeps_in_native_code": Line("rms", "timeout", "no answer within 3 s while running"),
    "fork_bomb": Line("rms", "crash", "BlockingIOError|Resource temporarily", sandbox=True),
    "memory_bomb": Line("rms", "crash", RESOURCES, sandbox=True, slow=True),
    "disk_filler": Line("rms", "crash", "No space left|File too large|quota", sandbox=True),
    "segfaults": Line("rms", "crash", "SIGSEGV"),
    "illegal_access_gpu": Line("rms", "crash", "illegal memory access|CUDA error", "gpu"),
    "opens_a_socket": Line("rms", "crash", NOT_SEEN, sandbox=True),
    "reads_environment_for_keys": Line("rms", "crash", "LookupError: no key to be found"),
    "reads_judges_environment": Line("rms", "crash", "no process of the judge's", sandbox=True),
    "signals_the_judge": Line("rms", "crash", "no other process can be signalled", sandbox=True),
    "remounts": Line("rms", "crash", "remount refused|SIGSYS|not permitted", sandbox=True),
    "writes_outside_scratch": Line("rms", "crash", NOT_SEEN, sandbox=True),
    # reference fall-back: welcome, and never called custom
    "reference_renamed": Line("linear", "correct", provenance="library"),
    "falls_back_to_torch": Line("linear", "correct", forms="cpu", provenance="library"),
}  # fmt: skip

PROBLEM_FAULTS: dict[str, str] = {
    "constant_output": "constant|trivial|does not depend",
    "output_independent_of_an_input": "depend",
    "zero_initialised_weights": "zero|trivial|depend",
}
"""Faults of a task -> why opening it must raise TaskError. Needs the judge's ``admission``."""

HONEST: dict[str, Line] = {
    "split_k": Line("linear", "correct"),
    "other_sum_order": Line("rms", "correct"),
    "library_norm": Line("rms", "correct", provenance="library"),
    "three_bfloat16": Line("linear", "correct"),
    "three_tf32_gpu": Line("linear", "correct", forms="gpu"),
    "fused_chain": Line("softmax", "correct"),
    "two_outputs": Line("two_outputs", "correct"),
    "tiny_eps": Line("tiny_eps", "correct"),
    "merged_prepack": Line("linear", "correct"),
    "strided_outputs": Line("linear", "correct"),
    "parallel": Line("rms", "correct", forms="cpu"),
    "two_streams_gpu": Line("linear", "correct", forms="gpu"),
    "clamped": Line("relu", "correct"),
    "skips_the_future": Line("causal", "correct"),
    "digamma": Line("digamma", "correct"),
    "gated": Line("gated", "correct"),
    "sine": Line("sine", "correct"),
    "slow_but_correct": Line("rms", "discard", "not above"),
}

OPEN: dict[str, Line] = {
}  # fmt: skip
"""Kinds of cheats that the list does not have and that get through as yet (in ``open/``)."""

AFTERWARDS = {
    "rms": "other_sum_order", "linear": "merged_prepack", "softmax": "fused_chain",
    "two_outputs": "two_outputs", "tiny_eps": "tiny_eps", "relu": "clamped", "causal": "skips_the_future",
    "digamma": "digamma", "gated": "gated", "sine": "sine",
}  # fmt: skip
"""Task -> the honest kernel that is judged after each cheat."""
