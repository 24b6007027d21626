"""Split an instruction into what is wanted and what is not, by rule and without a model.

Dense retrieval hardly reads negation: "no dosage tables" brings passages with dosage tables nearer. So the unwanted part is
found here and embedded on its own; `away` lowers the passages that resemble it. The rules cover English.

A cue opens an unwanted part ("no", "except for", "leave out"), which ends with its clause; or it closes one ("... can be
ignored"), which began with its clause. Limits of time and number ("no later than 2020"), additions ("not only") and double
negations ("do not leave out", "nothing but") exclude nothing. Negations that describe the reader or the topic are not cues
either ("patients who have no insurance", "foods to avoid").
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MAX_CHARACTERS = 4000
"""Characters of an instruction that is split, about what an encoder reads. It bounds the work of a request."""
Span = tuple[int, int]
"""First character, and the one after the last."""


class Parts(NamedTuple):
    """An instruction in two parts.

    Attributes:
        wanted: the instruction without its unwanted parts and their cues.
        unwanted: what it excludes, joined by "; "; empty: nothing.
        spans: of the unwanted parts in the instruction, ascending, without their cues.
    """

    wanted: str
    unwanted: str
    spans: tuple[Span, ...]


def _any(*alternatives: str) -> str:
    return rf"(?:{'|'.join(alternatives)})"


_NOT = _any(
    "(?:(?:do|does|did|need|will|would|should|must|may|can) )?not",
    r"(?:do|does|did|would|should|need|must|wo|ca)n['’]t", "cannot", "never",
)  # fmt: skip
_BE = _any("is", "are", "be", "was", "were", "would be", "will be", "should be")
_DROP = _any(
    "leav(?:e|ing) (?:out|off|aside)", "omit(?:ting)?", "exclud(?:e|ing)", "skip(?:ping)?", "ignor(?:e|ing)", "avoid(?:ing)?",
    "(?:stay|staying|steer|steering|keep|keeping) (?:clear of|away from|out of)",
)  # fmt: skip
_LEAVE = r"(?:leav(?:e|ing)|keep(?:ing)?|put(?:ting)?|set(?:ting)?)"
_ASIDE = (
    r"(?:out of (?:it|this|the (?:answer|results?))|out|aside|off|away|(?:for|to) (?:later|another|other)(?: \w+)?)"
)
_WISH = _any(
    "want", "need", "like", "require", "expect", "care (?:about|for)", "bother(?: me)? with", "give(?: me)?", "show(?: me)?",
    "bring(?: me)?", "tell me about", "include", "mention", "list", "discuss", "cover", "describe", "return", "use", "cite", "see",
)  # fmt: skip
_LIMIT = _any(
    "later", "earlier", "more", "less", "fewer", "longer", "shorter", "older", "newer", "larger", "smaller", "higher", "lower",
    r"(?:from |published |dated |written )?(?:after|before|until|beyond|above|below|over|under|since|past) (?:the |year |end of )*(?:\d|jan|feb|mar|apr|may|june?|july?|aug|sep|oct|nov|dec|mid-|late |early )\w*",
)  # fmt: skip

_NEUTRAL = _any(
    rf"(?:{_NOT}|no|nothing|none) {_LIMIT}",
    rf"{_NOT} (?:only|just|merely|solely|simply|necessarily|least|yet|always|sure|certain|enough|sufficient|at all|all|to mention|that|so)",
    r"rather (?:than|not) (?:only|just|merely|solely)",
    r"(?:whether or|or|if|why) not",
    r"with or without",
    r"without (?:delay|doubt|question|fail|exception)",
    r"no (?:matter|doubt|one|wonder|less|\d+)\b|no\. ?\d+",
    r"(?:nothing|none|no one|nobody|no (?:\w+ ){1,3}?)(?: ?(?:else )?(?:but|except|other than|besides?|apart from))",
    # double negation
    rf"(?:{_NOT}|without|avoid|no need to|no reason to)(?: to)? (?:{_DROP}|forget(?:ting)?|neglect(?:ing)?|overlook(?:ing)?|{_LEAVE} (?:\w+ ){{1,6}}?{_ASIDE})",
    r"(?:not|never|nor) (?:without|unlike|un\w+|in\w+able|in\w+ible|irrelevant)",
)  # fmt: skip
_AT_CLAUSE = (
    r"(?:(?<=^)|(?<=[,;:(.!?–—-]\s)|(?<=[\n(*•])|(?<=and )|(?<=but )|(?<=or )|(?<=please )|(?<=also )|(?<=while ))"
)
"""Before a cue that is one only where a clause or a list item begins; "foods to avoid" names a topic."""
_OPENS = _any(
    r"anything (?:but|except|other than)|(?:everything|all) (?:but|except(?: for)?)",
    r"except(?:ing)?(?: for| from)?|with the exception of|apart from|aside from|free (?:of|from)",
    r"(?:rather|other) than|instead of|without(?: any)?|neither|nor",
    r"(?:would |['’]d )?rather not (?:see|have|read|get|hear about)",
    rf"(?:{_AT_CLAUSE}|(?<=must )|(?<=should ))(?:{_DROP}|cut|forget(?: about)?|spare me|minus)",
    r"(?:can|could) (?:do without|skip|drop|ignore)",
    rf"(?:{_NOT}|no need to)(?: to)? (?:wish to |want to |need to )?{_WISH}",
    rf"(?:{_NOT}|(?:is|are|am|was)n['’]t) (?:be )?(?:interested in|looking for|after|asking (?:about|for))",
    r"(?:no|little) (?:interest in|use for|need (?:for|of)|mention of|reference to|discussion of)",
    r"nothing (?:about|on|from|in|by|with|that|to do with|related to)|none of|never (?:about|from)",
    rf"(?:{_AT_CLAUSE}|(?<=with )|(?<=want )|(?<=need )|(?<=include )|(?<=give )|(?<=show )|(?<=use )|(?<=contain )|(?<=mention ))no",
    rf"(?:{_AT_CLAUSE}|(?<=(?:this|that|here) is )|(?<=it is )|(?<=it['’]s )|(?<=that are )|(?<=which are )|(?<=that is )|(?<=which is ))not",
)  # fmt: skip
_ASKED = r"(?:\w+ly )?(?:meant|fine|sought|the (?:aim|point|goal|target)|what I (?:mean|want|need)|wanted|needed|required|welcome|relevant|of (?:any )?(?:interest|use|help)|helpful|useful|desired|asked for|for me|my concern)"
_UNWANTED = _any(
    rf"(?:not|never) {_ASKED}",
    "unwanted", "unneeded", "unnecessary", "unwelcome", "unhelpful", "irrelevant", "superfluous", "pointless", "useless", "needless",
    "off[- ]topic", "off[- ]limits", "out of (?:scope|place)", "off the table", "best (?:left out|avoided|omitted)", "beside the point",
    r"no (?:use|help|good|concern of (?:mine|ours)|part of (?:it|this))", r"of (?:no|little) (?:use|interest|help|value)", "excluded", "forbidden",
    r"(?:outside|beyond|not within) (?:of )?(?:my|our|the|this|its) (?:\w+ )?(?:scope|interests?|needs?|question|topic|remit)",
    r"(?:only )?an? (?:distraction|waste)", "to be (?:avoided|left out|omitted|excluded|ignored|skipped)",
)  # fmt: skip
_GONE = _any(
    "ignored", "left (?:out|aside|off|for (?:later|another|other))", "omitted", "skipped", "dropped", "excluded", "disregarded", "avoided",
    "passed over", "set aside", "put aside", "absent", "missing", "cut",
)  # fmt: skip
_CLOSES = _any(
    rf"(?:{_BE}|feels?|remains?|lies?|falls?) {_UNWANTED}",
    rf"(?:is|are|was|were)n['’]t {_ASKED}",
    r"(?:(?:is|are) out|(?:is |are )?excluded|(?:do|does|is|are)(?: not|n['’]t)|(?:would be|is|are) too \w+)(?=[.;!?]|$)",
    r"(?:can|may|must|should) wait|(?:have|has|had) no (?:place|part|business)",
    rf"(?:can|may|might|should|must|could|has to|have to|ought to|needs? to|{_BE}) (?:all |safely |be |all be |simply be )*{_GONE}",
    r"(?:can|may|should|must)? ?(?:stays?|remains?|keeps?) (?:out|away|aside|off|elsewhere)",
    rf"{_NOT} (?:concern|interest|matter|belong|help|count|apply|fit|suit|appeal|(?:have to |need to )?(?:appear|be (?:included|shown|mentioned|listed|covered)))",
    r"(?:miss(?:es)? the point|bores? (?:me|us)|turns? (?:me|us) off|goe?s? beyond (?:my|our) needs?|belongs? (?:elsewhere|in (?:an)?other)|adds? nothing|distracts?(?: me)?)",
    r"(?:would|will) (?:only |just |merely )?(?:distract|confuse|overwhelm|clutter|bore|be wasted)|(?:leaves?|left) me cold|scares? (?:me|us)",
    r"(?:is|are) (?:dealt with|covered|treated) (?:elsewhere|(?:in|on) (?:an)?other)",
)  # fmt: skip
_SENTENCE = re.compile(r"[^.!?;]*(?:[.!?;](?!\s|$)[^.!?;]*)*[.!?;]?\s*")
_CUE = re.compile(
    rf"(?P<neutral>\b{_NEUTRAL}\b)|(?P<around>{_AT_CLAUSE}{_LEAVE} (?P<inner>[^.;:!?]{{2,160}}?) {_ASIDE}(?=\s*(?:[.,;:!?]|$|and |but )))"
    rf"|(?P<opens>\b{_OPENS})\b",
    re.IGNORECASE,
)
_CLOSING = re.compile(rf"\b{_CLOSES}\b", re.IGNORECASE)
_STARTERS = _any(
    "for", "with", "in", "on", "at", "from", "to", "as", "which", "who", "that", "because", "since", "while", "where", "when", "if",
    "although", "though", "so", "then", "just", "only", "instead", "please", "but", "yet", "I", "we", "it", "what", "how", "why", "show",
    "give", "list", "tell", "explain", "describe", "include", "find", "focus", "use", "compare", "preferably", "ideally", "written", "aimed",
)  # fmt: skip
_ENDS = re.compile(
    rf"[.!?;:](?:\s|$)|\s[–—-]\s|,?\s(?:but|although|though|because)\s|[,(]\s?(?:and )?{_STARTERS}\b|\sand (?:instead|only|please|{_STARTERS[3:-1]})\b",
    re.IGNORECASE,
)
"""Where an unwanted part that a cue opened ends; other commas separate items of a list."""
_CLAUSE = re.compile(r"[:(]\s|\s[–—-]\s|,?\s(?:but|while|whereas)\s|,\sand\s(?=\w+\s(?:can|is|are|may)\b)")
"""Where the clause begins whose predicate excludes its subject."""
_EDGE = " \t\n,;:.!?()\"'–—-"
_SMALL = re.compile(
    r"^(?:(?:and|or|any|the|a|an|also|of|all|please|it|me|us|this|that|them|those|these)\b\s*)*$", re.IGNORECASE
)
_TAIL = re.compile(rf"(?:[{re.escape(_EDGE)}]|\b(?:and|or|nor|but))+$", re.IGNORECASE)
_LEAD = re.compile(r"^(?:(?:and|or|nor|but|any|either|also|please)\s+)+", re.IGNORECASE)


@lru_cache(1024)
def split(instruction: str) -> Parts:
    """Split an instruction into its wanted and unwanted parts; one of more than `MAX_CHARACTERS` stays whole."""
    cuts = sorted(_cuts(instruction)) if len(instruction) <= MAX_CHARACTERS else []
    if not cuts:
        return Parts(instruction.strip(), "", ())
    spans: list[Span] = []
    kept, last = [], 0
    for cut, span in cuts:
        if cut[1] <= last:
            continue
        spans.append((max(span[0], last), span[1]))
        kept.append(instruction[last : max(cut[0], last)])
        last = cut[1]
    kept.append(instruction[last:])
    wanted = " ".join(text for part in kept if (text := part.strip(" ,;:–—-\n\t")) and text.strip(_EDGE))
    wanted = re.sub(r"\s+([.!?,;:])", r"\1", re.sub(r"\s+", " ", wanted)).strip()
    return Parts(wanted, "; ".join(instruction[a:b] for a, b in spans), tuple(spans))


def away(wanted: np.ndarray, unwanted: np.ndarray, weight: float) -> np.ndarray:
    """Move queries away from what they exclude; the score of a passage p becomes wanted·p - weight · unwanted·p, scaled.

    Args:
        wanted: (n, d) unit vectors of the queries under the wanted parts of their instructions.
        unwanted: (n, d) unit vectors of the unwanted parts.

    Returns:
        (n, d) float32 unit vectors.
    """
    moved = wanted - weight * unwanted
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    return np.asarray(np.where(norms > 0, moved / np.maximum(norms, np.finfo(np.float32).tiny), wanted), np.float32)


def _cuts(text: str) -> Iterator[tuple[Span, Span]]:
    """Yield what to cut from the instruction, and the unwanted part in it."""
    for sentence in _SENTENCE.finditer(text):
        start, end = sentence.span()
        if start == end:
            continue
        if closing := _closing(text, start, end):
            yield closing
            end = closing[0][0]
        place = start
        while cue := _CUE.search(text, place, end):
            first = place = cue.end()
            if cue["around"] and (span := _trimmed(text, *cue.span("inner"))):
                yield cue.span(), span
            if cue["opens"]:
                place = _end(text, first, _following(text, first, end), initial=cue.start() - start <= 1)
                if span := _trimmed(text, first, place):
                    yield (cue.start(), place), span


def _closing(text: str, start: int, end: int) -> tuple[Span, Span] | None:
    """The subject of a sentence whose predicate excludes it."""
    if (closing := _CLOSING.search(text, start, end)) is None:
        return None
    begin = max((boundary.end() for boundary in _CLAUSE.finditer(text, start, closing.start())), default=start)
    if re.match(r"(?:no|nothing|none|nobody)\b", text[begin : closing.start()], re.IGNORECASE):
        return None  # "nothing may be left out"
    span = _trimmed(text, begin, closing.start())
    return ((begin, end), span) if span else None


def _following(text: str, first: int, end: int) -> int:
    """Where the next cue begins that ends the part from `first` on; `end` if there is none."""
    place = first
    while cue := _CUE.search(text, place, end):
        if not cue["neutral"] or text[max(first, cue.start() - 6) : cue.start()].rstrip(" and").endswith(","):
            return cue.start()
        place = cue.end()
    return end


def _end(text: str, first: int, end: int, initial: bool) -> int:
    """Where an unwanted part that begins at `first` ends, at the latest at `end`."""
    if match := _ENDS.search(text, first, end):
        return match.start()
    prepositions = ("than", "of", "without", "for", "from", "excluding")
    if initial and text[max(0, first - 12) : first].rstrip().lower().endswith(prepositions):
        comma = text.find(",", first, end)
        if comma > 0 and not re.search(r"\b(?:or|and|nor)\b", text[comma:end]):
            return comma
    return end


def _trimmed(text: str, start: int, end: int) -> Span | None:
    """The span without punctuation and conjunctions at its edges; None if nothing is left."""
    while start < end and text[start] in _EDGE:
        start += 1
    end = start + len(_TAIL.sub("", text[start:end]))
    if lead := _LEAD.match(text[start:end]):
        start += lead.end()
    return None if start >= end or _SMALL.match(text[start:end]) else (start, end)
