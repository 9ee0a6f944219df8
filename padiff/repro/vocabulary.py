"""The vocabulary of scripts: all names that the code of a script may use."""

from __future__ import annotations

from functools import lru_cache

from padiff.frameworks.catalog import ARGUMENTS, FIXES
from padiff.repro.expressions import LAYER_ARGUMENTS, LAYER_FUNCTIONS
from padiff.repro.languages import LANGUAGES
from padiff.system.code import Vocabulary

#: The vocabulary of tables of values.
LITERALS = Vocabulary(functions=frozenset({"float"}))

# Names in the lines that call an optimizer or open an autocast.
_VARIABLES = "made loss dtype weight optimizer step rate before group RATES TENSORS DTYPES"
_CHAINS = {
    "torch": "torch.nn.Parameter torch.no_grad torch.autocast torch.float16 torch.bfloat16",
    "paddle": "paddle.create_parameter paddle.amp.auto_cast",
}
_MEMBERS = "T reshape shape sum backward step clear_grad set_lr set_value param_groups grad copy_"


@lru_cache(maxsize=8)
def vocabulary_of(framework: str) -> Vocabulary:
    """Return the vocabulary of a framework's scripts, without the variables of their tensors."""
    language, fixes = LANGUAGES[framework], FIXES[framework]
    functions = (language.layers.get(name, name) for name in LAYER_FUNCTIONS)
    return Vocabulary(
        variables=frozenset(_VARIABLES.split()),
        functions=frozenset({"given", "cast", "gradient", "float", "enumerate"}),
        chains=fixes.chains.union(
            _CHAINS[framework].split(),
            language.calls.values(),
            (f"{language.functional}.{name}" for name in functions),
        ),
        members=frozenset({*_MEMBERS.split(), *language.methods.values()}),
        keywords=fixes.keywords.union(
            ARGUMENTS, LAYER_ARGUMENTS, language.arguments.values(), ("dtype", "enable", "enabled", "level")
        ),
    )
