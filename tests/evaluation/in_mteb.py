"""Tasks of mteb over local files, which keep their rankings and values. mteb is imported in functions: it takes seconds."""

from infembed_ray.evaluation.tasks import catalogue
from tests.evaluation import published

NAMES = {
    **{f"followir/{name}": f"{name.title()}InstructionRetrieval" for name in published.FOLLOWIR},
    **{f"bright/{name}": f"Bright{name.title()}Retrieval" for name in ("biology", "leetcode")},
    "instructir": "InstructIR",
    **{f"mfollowir/{language}": "mFollowIR" for language in ("fas", "rus", "zho")},
    **{f"mfollowir-cross/eng-{language}": "mFollowIRCrossLingual" for language in ("fas", "rus", "zho")},
    "ifir/fiqa": "IFIRFiQA",
    "ifir/scifact_open": "IFIRScifact",
    "ifir/nfcorpus": "IFIRNFCorpus",
    **{f"ifir/{name}": f"IFIR{name.title()}" for name in ("aila", "fire", "pm", "cds")},
    **{f"bright-pro/{name}": path.removeprefix("mteb/") for name, path in published.BRIGHT_PRO.items()},
    "nevir": "NevIR",
}
"""Task -> its name in mteb, which has neither MAIR nor ExcluIR."""


def mteb_task(original, directory, **changes):
    """Make a task class of mteb that reads a local directory and keeps rankings and values per query."""

    class Local(original):
        metadata = original.metadata.model_copy(
            update={"dataset": {"path": str(directory), "revision": "local"}, **changes}
        )

        def task_specific_scores(self, scores, qrels, results, hf_split, hf_subset):
            self.seen = {
                q: {key: values[key] for key in ("ndcg_cut_10", "ndcg_cut_5", "map_cut_1000")}
                for q, values in scores.items()
            }
            self.run = {q: dict(ranking) for q, ranking in results.items()}
            return super().task_specific_scores(scores, qrels, results, hf_split, hf_subset)

    Local.__name__ = original.__name__
    return Local


def in_mteb(name, mirror):
    """Make mteb's task over the files of one of our tasks."""
    import mteb

    original, subset = type(mteb.get_task(NAMES[name])), name.rpartition("/")[2]
    subsets = original.metadata.eval_langs
    only = {"eval_langs": {subset: subsets[subset]}} if isinstance(subsets, dict) else {}
    return mteb_task(original, mirror / catalogue.TASKS[name].repositories[0], **only)()


def theirs(task, encoder):
    """Run a task in mteb; return its scores. The task keeps rankings and values."""
    import mteb

    (result,) = mteb.evaluate(encoder, task, cache=None, co2_tracker=False, show_progress_bar=False).task_results
    ((scores,),) = result.scores.values()
    return scores
