"""What speculation did and where its time went."""

from generations import start

from statecore.display import telemetry_html
from statecore.speculative import ModelDraft, NGramDraft, run_measured


def test_a_measured_run_is_the_run(capsys):
    """The same tokens; the parts are less than the whole; counts agree with the run's own."""
    draft = NGramDraft(num_draft=4, min_ngram=1, worth=0.0)
    plain, gen = (start("decay", max_tokens=40) for _ in range(2))
    tokens, found = run_measured(gen, 30, draft, progress=True)
    assert tokens == plain.run(30) and gen.num_left == 10
    assert found.num_tokens == 60 and found.tokens_per_second > 0
    parts = found.seconds_draft, found.seconds_verify, found.seconds_commit
    assert all(parts) and sum(parts) < found.seconds
    assert sum(found.accepted) == gen.speculation.num_accepted == sum(found.accepted_at)
    assert sum(found.drafted) == gen.speculation.num_drafted == sum(found.drafted_at)
    assert found.mode == "exact" and 0 < found.rate <= 1 and gen._run.clock is None
    assert "drafts accepted" in capsys.readouterr().out
    picture = str(telemetry_html(found))
    assert "<svg" in picture and "draft 1" in picture and "verify" in picture


def test_a_stretch_without_drafts_is_told_as_such():
    gen = start("decay", max_tokens=8)
    _, found = run_measured(gen, 1, ModelDraft(model=gen.runtime.model))
    assert found.accepted == () and found.rate != found.rate and found.mode is None
    assert "tokens a second" in str(telemetry_html(found))
