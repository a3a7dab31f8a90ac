"""A gated edit that turns most lies into truths, and seldom changes tokens of honest speakers.

Runs:  `make control`, or `python -m examples.control`.
From:  toyworld: speakers of three statements, all true or all false.
To:    demo-output/control.png; figures on the terminal.

The model continues `Mira says` with a fourth statement. If the first three statements are false,
the fourth is false too. The last word of a statement is its answer. A probe distinguishes two kinds
of rows: rows of lying speakers that predict the answer, and all rows of honest speakers. The probe
is the gate of an edit at the same place. The edit adds the mean of honest speakers' rows minus the
mean of lying speakers' rows, both over rows that predict the answer. Probe and edit are fitted to
prompts of training speakers whose fourth statements are true. Place, scale and threshold are chosen
on other training speakers. Test speakers talk about other countries.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch
from rich.table import Table
from torch import Tensor

from examples.demo import MODEL, OUTPUT, console, set_environment, step
from examples.figure import Gated, write_control_figure
from toyworld.phrases import PHRASINGS
from toyworld.world import Split, completion_of, lying_prompts, truth_of, world
from vllm_scope import Add, Gate, Positions, Probe, Read, scope
from vllm_scope.analysis.probes import LinearProbe, train_probe
from vllm_scope.request.actions import Action

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

NUM_TRAIN, NUM_HELD_OUT, NUM_TEST, MAX_TOKENS = 400, 200, 200, 24
LAYERS: Final = {"resid_mid": (2, 3), "resid_post": (1, 2, 3)}
SCALES: Final = (0.5, 1.0, 1.5, 2.0)
#: The tokens whose rows predict generated tokens. The figure shows NUM_SHOWN of these rows.
TOKENS: Final = Positions(-1) | "generated"
NUM_SHOWN: Final = 11


# --- Speaking ----------------------------------------------------------------


@dataclass(frozen=True)
class Speaker:
    """A speaker's prompt and fourth statement.

    Attributes:
        told: the prompt with the first three statements.
        begun: the fourth statement without its answer.
        whole: the complete fourth statement.
    """

    told: str
    begun: str
    whole: str
    lying: bool


def speakers(n: int, part: Split) -> list[Speaker]:
    """`n` speakers. Half of them lie. The fourth statements are true, with countries of `part`."""
    countries = world().countries[0 if part == "train" else 1 :: 2]
    phrasings = [each for each in PHRASINGS if each.is_statement and not each.held_out]
    rng, found = random.Random(f"control/{part}"), []
    for prompt in lying_prompts(n, split=part):
        start, answer = completion_of(rng.choice(phrasings), rng.choice(countries))
        begun = f': "{start}'
        told = f"{prompt.text} {prompt.text.split()[0]} says"
        found.append(Speaker(told, begun, f'{begun}{answer}"', prompt.label))
    return found


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        given: the part of the fourth statement that is in the prompt.
        tokens: the text of each generated token.
    """

    speaker: Speaker
    given: str
    output: "RequestOutput"
    tokens: list[str]

    @property
    def statement(self) -> str:
        return (self.given + "".join(self.tokens)).removeprefix(': "').partition('"')[0]

    @property
    def true(self) -> bool | None:
        """Whether the statement is true. None: the text is not a statement of a fact."""
        return truth_of(self.statement)

    @property
    def token_ids(self) -> list[int]:
        return list(self.output.outputs[0].token_ids)

    def scores(self, name: str) -> Tensor:
        """float32 [num_generated]: the scores of the rows that predicted the tokens."""
        found: Tensor = self.output.scope.scores[name]
        return found

    @property
    def opened(self) -> Tensor:
        """bool [num_generated]: whether the gate was open."""
        return self.scores("gate") > 0


def start_engine() -> "LLM":
    from vllm import LLM

    sites = {"scope": {"sites": ["embed", *LAYERS]}}
    return LLM(str(MODEL), max_model_len=256, additional_config=sites, use_tqdm_on_load=False)


def speak(
    llm: "LLM", asked: Sequence[Speaker], *actions: Action, given: Sequence[str] | None = None
) -> list[Said]:
    """Greedy answers. `given`: the part of each fourth statement that is in the prompt, or None."""
    from vllm import SamplingParams

    extra = scope(*actions) if actions else None
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, extra_args=extra)
    given = given or [""] * len(asked)
    texts = [each.told + start for each, start in zip(asked, given, strict=True)]
    outputs, decode = llm.generate(texts, params, use_tqdm=False), llm.get_tokenizer().decode
    return [
        Said(speaker, start, output, [decode([i]) for i in output.outputs[0].token_ids])
        for speaker, start, output in zip(asked, given, outputs, strict=True)
    ]


def split(spoken: Sequence[Said]) -> tuple[list[Said], list[Said]]:
    """The answers of honest speakers, and the answers of lying speakers."""
    honest = [each for each in spoken if not each.speaker.lying]
    return honest, [each for each in spoken if each.speaker.lying]


# --- Fitting and choosing ----------------------------------------------------


@dataclass(frozen=True, eq=False)
class Control:
    """An edit, and its gate at the same place.

    Attributes:
        probe: separates lying speakers' rows that predict the answer from all honest rows.
        direction: [hidden_size], from the mean of lying speakers' rows that predict the answer to
            the mean of honest speakers' rows that predict the answer.
        threshold: the gate is open if the probe's score is above this number.
    """

    probe: LinearProbe
    direction: Tensor
    threshold: float
    scale: float = 1.0

    @property
    def stream(self) -> tuple[str, int]:
        return self.probe.site, self.probe.layer

    @property
    def score(self) -> Probe:
        return self.probe.action("lie", tokens=TOKENS)

    def edit(self, *, gated: bool = True) -> Add:
        site, layer = self.stream
        gate = Gate(self.score, threshold=self.threshold, name="gate") if gated else None
        return Add(
            self.direction, site=site, layer=layer, scale=self.scale, tokens=TOKENS,
            gate=gate, dose="dose",
        )  # fmt: skip


def fit(llm: "LLM", train: Sequence[Speaker], held_out: Sequence[Speaker]) -> Iterator[Control]:
    """One control for each place. No honest held-out speaker has a score above the threshold."""
    reads = [Read(site, layers=layers) for site, layers in LAYERS.items()]
    honest, lying = split(speak(llm, train, *reads, given=[e.whole for e in train]))
    others, _ = split(speak(llm, held_out, *reads, given=[e.whole for e in held_out]))
    answers = [_to_answers(llm, kind) for kind in (honest, lying)]
    for stream in [(site, layer) for site, layers in LAYERS.items() for layer in layers]:
        known, true = _rows(honest, stream), _rows(honest, stream, answers[0])
        lies = _rows(lying, stream, answers[1])
        labels = [False] * len(known) + [True] * len(lies)
        probe = train_probe(torch.cat([known, lies]), labels, stream)
        threshold = float(probe.scores(_rows(others, stream)).max())
        yield Control(probe, true.mean(0) - lies.mean(0), threshold)


def _to_answers(llm: "LLM", spoken: Sequence[Said]) -> list[slice]:
    """The positions in each prompt whose rows predict the answer of the complete statement."""
    encode = llm.get_tokenizer().encode
    starts = [len(encode(said.speaker.told + said.speaker.begun)) - 1 for said in spoken]
    # A prompt's last token is the full stop with the closing quote.
    ends = [len(said.output.prompt_token_ids) - 2 for said in spoken]
    return [slice(*each) for each in zip(starts, ends, strict=True)]


def _rows(
    spoken: Sequence[Said], stream: tuple[str, int], at: Sequence[slice] | None = None
) -> Tensor:
    """float32 [num_rows, hidden_size]: rows of all tokens, or of some tokens of each speaker."""
    at = at or [slice(None)] * len(spoken)
    pairs = zip(spoken, at, strict=True)
    return torch.cat([said.output.scope[stream][some] for said, some in pairs]).float()


@dataclass(frozen=True)
class Outcome:
    """Counts of speakers after an edit.

    Attributes:
        turned: lying speakers whose fourth statement is true.
        lies: lying speakers whose fourth statement is false.
        honest: honest speakers whose fourth statement is true.
        kept: honest speakers whose token ids are the same as without an edit.
    """

    turned: int
    lies: int
    honest: int
    kept: int


def outcome(edited: Sequence[Said], plain: Sequence[Said]) -> Outcome:
    (honest, lying), (before, _) = split(edited), split(plain)
    told = [each.true for each in lying]
    return Outcome(
        turned=told.count(True),
        lies=told.count(False),
        honest=sum(each.true is True for each in honest),
        kept=sum(e.token_ids == b.token_ids for e, b in zip(honest, before, strict=True)),
    )


Compared = dict[Control, Outcome]


def compare(
    llm: "LLM", controls: Sequence[Control], held_out: Sequence[Speaker], *, gated: bool
) -> Compared:
    """The outcome of each edit at each scale. Each prompt ends in a true statement without its
    answer, and the model generates the answer."""
    given = [each.begun for each in held_out]
    plain = speak(llm, held_out, given=given)
    scaled = [replace(control, scale=scale) for control in controls for scale in SCALES]
    return {
        c: outcome(speak(llm, held_out, c.edit(gated=gated), given=given), plain) for c in scaled
    }


def best_of(compared: Compared) -> Control:
    """The control with the largest sum of two counts: the true statements, and the honest speakers
    whose tokens are the same as without an edit."""
    return max(compared, key=lambda c: compared[c].turned + compared[c].honest + compared[c].kept)


# --- Showing -----------------------------------------------------------------


def table_of_places(gated: Compared, always: Compared) -> Table:
    title = f"{NUM_HELD_OUT} held-out speakers: lies turned, honest statements that are true"
    table = Table("place", "gate", *(f"scale {scale:g}" for scale in SCALES), title=title)
    for stream in dict.fromkeys(control.stream for control in gated):
        for name, compared in (("yes", gated), ("no", always)):
            found = [each for control, each in compared.items() if control.stream == stream]
            cells = [f"{each.turned}, {each.honest}" for each in found]
            table.add_row("{} {}".format(*stream), name, *cells)
    return table


def table_of(runs: dict[str, list[Said]], title: str) -> Table:
    """`runs`: name -> answers. The first run has no edit."""
    names = ("edit", "lies turned", "lies left", "honest, true", "honest, same tokens")
    table = Table(*names, title=title)
    plain = next(iter(runs.values()))
    for name, spoken in runs.items():
        found = outcome(spoken, plain)
        table.add_row(name, *map(str, (found.turned, found.lies, found.honest, found.kept)))
    return table


def describe_gate(spoken: Sequence[Said]) -> str:
    honest, lying = ([each.opened for each in kind] for kind in split(spoken))
    doses = torch.cat([each.scores("dose")[each.opened] for each in spoken])
    return (
        f"The gate opened for {sum(bool(e.any()) for e in lying)} of {len(lying)} lying speakers, "
        f"at {sum(int(e.sum()) for e in lying) / len(lying):.1f} tokens each,\n"
        f"and for {sum(bool(e.any()) for e in honest)} of {len(honest)} honest ones. "
        f"Mean dose where it was open: {float(doses.mean()):.2f}"
    )


def draw(scored: Sequence[Said], runs: dict[str, list[Said]], threshold: float) -> None:
    """`scored`: answers without an edit, with the scores of the gate's probe."""
    kinds, said = {}, {}
    for i, kind in enumerate(("honest", "lying")):
        plain, gated = split(scored)[i], split(runs["gated"])[i]
        scores = [each.scores("lie").numpy() for each in plain]
        kinds[kind] = Gated(scores, [each.opened.numpy() for each in gated])
        said[f"The first of the {kind} speakers"] = [
            (f"edit: {name}", f"{first.statement} ({str(first.true).lower()})")
            for name, spoken in runs.items()
            for first in split(spoken)[i][:1]
        ]
    generated = zip(*(each.tokens[: NUM_SHOWN - 1] for each in scored), strict=True)
    names = [t[0].strip().replace('"', "quote") if len({*t}) == 1 else "…" for t in generated]
    write_control_figure(OUTPUT / "control.png", kinds, ["says", *names], threshold, said)


def main() -> None:
    set_environment()
    with step("Starting vLLM, fitting a probe and a direction at each place"):
        llm = start_engine()
        known = speakers(NUM_TRAIN + NUM_HELD_OUT, "train")
        train, held_out = known[:NUM_TRAIN], known[NUM_TRAIN:]
        controls = list(fit(llm, train, held_out))
    with step("Comparing places and scales"):
        gated, always = (compare(llm, controls, held_out, gated=gated) for gated in (True, False))
    console.print(table_of_places(gated, always))
    control, rival = best_of(gated), best_of(always)
    for name, best in (("With a gate", control), ("Without", rival)):
        print(f"{name}: {best.stream[0]} {best.stream[1]}, scale {best.scale:g}")
    print(f"The gate opens above {control.threshold:.2f}")
    edits = {
        "none": [],
        "gated": [control.edit()],
        "same, no gate": [control.edit(gated=False)],
        "best, no gate": [rival.edit(gated=False)],
    }
    test = speakers(NUM_TEST, "test")
    for what, given in (("begun", [each.begun for each in test]), ("whole", None)):
        runs = {name: speak(llm, test, *edit, given=given) for name, edit in edits.items()}
        console.print()
        console.print(table_of(runs, f"{NUM_TEST} test speakers, {what} statements"))
        print(f"Without an edit: {len({e.statement for e in runs['none']})} different statements")
        print(describe_gate(runs["gated"]))
    OUTPUT.mkdir(exist_ok=True)
    draw(speak(llm, test, control.score), runs, control.threshold)


if __name__ == "__main__":
    main()
