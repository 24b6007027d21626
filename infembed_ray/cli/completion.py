"""`infembed completion SHELL`: a script that completes verbs and names of settings.

The script holds all words, because a Python process per key press would take longer than typing. It is Bash; zsh reads it
through `bashcompinit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
_SCRIPT = """_infembed() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words
  if [[ $current == "=" || ${{COMP_WORDS[COMP_CWORD-1]}} == "=" || $current == */* ]]; then return; fi  # values: files
  case "${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" in
{cases}
    *) words="{verbs}" ;;
  esac
  if [[ $COMP_CWORD == 1 ]]; then words="{verbs}"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
}}
complete -o default -F _infembed infembed
"""


def script(shell: str, following: Mapping[str, Sequence[str]]) -> str:
    """Write the script of a shell, `bash` or `zsh`.

    Args:
        following: verb, of one or two words -> the words that can follow it.
    """
    cases = []
    for verb in sorted(following, key=lambda verb: -verb.count(" ")):  # two words are tried before one
        pattern = f'"{verb}"' if " " in verb else f'"{verb} "*'
        cases.append(f'    {pattern}) words="{" ".join(following[verb])}" ;;')
    verbs = " ".join(dict.fromkeys(verb.split()[0] for verb in following))
    return (_ZSH if shell == "zsh" else "") + _SCRIPT.format(cases="\n".join(cases), verbs=verbs)
