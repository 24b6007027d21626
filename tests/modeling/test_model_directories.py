"""Model directories of many kinds load exactly, or are refused in one line. Oracles: transformers, tokenizers, sentence-transformers."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from infembed_ray.errors import InputError
from infembed_ray.modeling.encoder import InstructionEncoder
from tests.modeling import backbones

TEXTS = [
    "Is aspirin dosed",
    "FOR nurses, in plain words; no brand names.",
    "a passage about bread " * 9,
    "a",
    "[SEP] é",
]
SENTENCE = "for nurses , in plain words ; no brand names . is aspirin dosed a passage about bread Is FOR"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA = {"head_dim": 8, "num_key_value_heads": 2, "layer_types": ["sliding_attention", "full_attention"]}
SINGLE = ["", "1_Pooling"]


def edit(path, remove=(), **changes):
    value = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({name: v for name, v in value.items() if name not in remove}))


def words(path, type="bert", tokenizer=None, folder="", **config):
    """A model of words with [CLS] and [SEP]; `tokenizer` changes its tokenizer_config.json."""
    path = path / folder
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *SENTENCE.split()])}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = dict(zip(["pad_token", "unk_token", "cls_token", "sep_token"], SPECIAL, strict=True))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=128, **names)
    ids = {"pad_token_id": 0, "eos_token_id": 3, "bos_token_id": 2, "vocab_size": backend.get_vocab_size()}
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(type, **{**SMALL, **ids, **config})).save_pretrained(path)
    made.save_pretrained(path)
    edit(path / "tokenizer_config.json", **tokenizer or {})


def made_for_embedding(
    path, write=words, pooling=None, bert=None, folders=SINGLE, kinds=("Transformer", "Pooling"), **st
):
    """A directory of sentence-transformers, with modules in these folders."""
    path.mkdir(exist_ok=True)
    write(path)
    listed = [
        (folder, k if "." in k else f"sentence_transformers.models.{k}")
        for folder, k in zip(folders, kinds, strict=True)
    ]
    entries = [{"idx": i, "name": str(i), "path": folder, "type": kind} for i, (folder, kind) in enumerate(listed)]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    edit(path / "1_Pooling" / "config.json", word_embedding_dimension=32, **pooling or {})
    edit(
        path / folders[0] / "sentence_bert_config.json",
        **{"max_seq_length": 128, "do_lower_case": False} | (bert or {}),
    )
    edit(path / "config_sentence_transformers.json", **st)


def family(path, name="qwen2", remove=(), tokenizer=None, **config):
    backbones.write(name, path)
    edit(path / "config.json", **config)
    edit(path / "tokenizer_config.json", remove, **tokenizer or {})


def foreign_tokenizer(path, **tokenizer):
    """Qwen2 with a tokenizer of words; transformers has a class for it."""
    words(path.with_name("other"))
    family(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(path.with_name("other") / name, path / name)
    edit(path / "tokenizer_config.json", ["tokenizer_class"], eos_token="[SEP]", **tokenizer)


def damaged(path, file="modules.json", text="{"):
    made_for_embedding(path)
    (path / file).write_text(text)


LAST = {"pooling_mode_lasttoken": True}
ST = partial(made_for_embedding)
EXACT = {  # builder, and whether sentence-transformers reads it as its files say
    "plain BERT": (words, True),
    "made for embedding": (ST, True),
    "one pooling in a list": (partial(ST, pooling={"pooling_mode": ["mean"]}), True),
    "pooling that names nothing": (partial(ST, pooling={"pooling_mode_mean_tokens": False}), True),
    "null prompts": (partial(ST, prompts=None, requirements={"transformers": ">=1", "x": "nonsense"}), False),
    "0_Transformer": (partial(ST, write=partial(words, folder="0_Transformer"), folders=["0_Transformer", "1_Pooling"]), True),
    "small letters": (partial(ST, bert={"do_lower_case": True}), True),
    "class of BERT": (partial(words, tokenizer={"tokenizer_class": "BertTokenizer"}), False),
    "class of RoBERTa": (partial(words, tokenizer={"tokenizer_class": "RobertaTokenizer"}), False),
    "class of T5": (partial(words, tokenizer={"tokenizer_class": "T5Tokenizer"}), False),
    "class of Llama": (partial(words, tokenizer={"tokenizer_class": "LlamaTokenizerFast"}), False),
    "unknown class": (partial(words, tokenizer={"tokenizer_class": "FancyTokenizer"}), True),
    "words for Qwen2": (foreign_tokenizer, False),
    "EOS by a flag, Qwen2": (partial(ST, write=partial(family, tokenizer={"add_eos_token": True}), pooling=LAST), False),
    "EOS by a flag, Mistral": (partial(ST, write=partial(family, name="mistral", tokenizer={"add_eos_token": True}), pooling=LAST), False),
    "EOS by a flag, Llama 3": (partial(ST, write=partial(family, name="llama3", tokenizer={"add_eos_token": True}), pooling=LAST), False),
    "ModernBERT": (partial(family, name="modernbert"), True),
    "Gemma 3": (partial(words, type="gemma3_text", sliding_window=8, **GEMMA), False),
    "bidirectional Gemma 3": (partial(words, type="gemma3_text", sliding_window=8, use_bidirectional_attention=True, **GEMMA), True),
    "Qwen3": (partial(words, type="qwen3", num_key_value_heads=2, head_dim=8), False),
    "XLM-RoBERTa": (partial(words, type="xlm-roberta"), True),
    "Phi-3, compared when it is loaded": (partial(words, type="phi3", num_key_value_heads=2), False),
    "Mamba": (partial(words, type="mamba"), False),
    "Bloom": (partial(words, type="bloom", n_layer=2, n_head=4), False),
    "GPT-2": (partial(words, type="gpt2", n_layer=2, n_head=4, n_embd=32), False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXACT)
def test_a_directory_is_read_as_its_files_say_and_saved_as_it_is_read(tmp_path, name):
    (write, by_theirs), path = EXACT[name], tmp_path / "model"
    write(path)
    encoder = InstructionEncoder.from_pretrained(path)
    own = encoder.encode_passages(TEXTS)
    root = path / "0_Transformer" if (path / "0_Transformer").is_dir() else path
    saved = Tokenizer.from_file(str(root / "tokenizer.json"))
    saved.no_truncation()
    ends = encoder.tokenizer.eos_token_id if name.startswith(("EOS", "words for")) else None
    texts = [text.lower().replace("[sep]", "[SEP]") if name == "small letters" else text for text in TEXTS]
    ids = [saved.encode(text).ids + [ends] * (ends is not None) for text in texts]
    if ends is None or saved.encode("a").ids[-1] != ends:
        assert [tokens.ids for tokens in encoder.tokenize_passages(TEXTS)] == ids
    model = AutoModel.from_pretrained(root, attn_implementation="eager").eval()
    with torch.no_grad():
        states = [model(input_ids=torch.tensor([t.ids])).last_hidden_state[0] for t in encoder.tokenize_passages(TEXTS)]
    causal = name.startswith(("EOS", "words for", "Gemma", "Qwen3", "Phi", "Mamba", "Bloom", "GPT"))
    pooled = torch.stack([each[-1] if causal else each.mean(0) for each in states])
    np.testing.assert_allclose(own, torch.nn.functional.normalize(pooled).numpy(), atol=2e-6)
    if by_theirs:
        theirs = SentenceTransformer(str(path), device="cpu").encode(TEXTS, normalize_embeddings=True)
        np.testing.assert_allclose(own, theirs, atol=2e-6)
    copy = tmp_path / "copy"
    if name == "words for Qwen2":
        with pytest.raises(InputError, match="by its tokenizer class for qwen2, which gives other tokens"):
            encoder.save_pretrained(copy)
        return
    encoder.save_pretrained(copy)
    np.testing.assert_allclose(InstructionEncoder.from_pretrained(copy).encode_passages(TEXTS), own, atol=2e-6)
    assert AutoTokenizer.from_pretrained(copy)(TEXTS[0])["input_ids"] == encoder.tokenize_passages(TEXTS)[0].ids


def adapters_of(path, whole=False, weights=True):
    from peft import LoraConfig, get_peft_model

    family(path.with_name("base"))
    adapted = get_peft_model(
        AutoModel.from_pretrained(path.with_name("base")), LoraConfig(r=2, target_modules=["q_proj"])
    )
    adapted.save_pretrained(path)
    if not weights:
        (path / "adapter_model.safetensors").unlink()
    if whole:
        shutil.copytree(path.with_name("base"), path, dirs_exist_ok=True)


def with_tokens(path, *tokens, write=words):
    write(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(path)


def quantized(method):
    return partial(
        family, quantization_config={"quant_method": method, "bits": 4}
    ), rf"its weights are quantized \({method}\)"


SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
REFUSED = {
    "adapters alone": (adapters_of, r"has adapters .* merge them"),
    "weights beside adapters": (partial(adapters_of, whole=True), r"has adapters"),
    "weights beside the config of adapters": (partial(adapters_of, whole=True, weights=False), r"has adapters"),
    **{method: quantized(method) for method in ("gptq", "bitsandbytes", "awq", "fp8", "mxfp4", "torchao", "zzz")},
    "two tokens added": (lambda path: with_tokens(path, "x1", "x2"), "x1, x2 were added without"),
    "a special token added": (lambda path: with_tokens(path, "<a>", "<b>", "<c>", "<d>", write=family), "were added without"),
    "tokenizer of another model": (lambda path: (words(path, **{"vocab_size": 9})), r"\d+ tokens but the model embeds 9: it is"),
    "no padding": (lambda path: (words(path), edit(path / "tokenizer_config.json", ["pad_token"])), "no padding token; name"),
    "T5": (partial(words, type="t5", **T5), "is an encoder-decoder"),
    "encoder of T5": (partial(words, type="t5", **T5, is_encoder_decoder=False), "is an encoder-decoder"),
    "BART": (partial(words, type="bart", decoder_start_token_id=2, **SEQ2SEQ), "is an encoder-decoder"),
    "CLIP": (lambda path: (words(path), AutoConfig.for_model("clip").save_pretrained(path)), "is not a text model"),
    "version of a library": (partial(ST, requirements={"transformers": "<5"}), r"requires transformers<5 .* but 5\."),
    "library": (partial(ST, requirements={"none-such": {"specifier": ">=1", "reason": "r"}}), "none-such>=1 .* but none is"),
    "version of torch": (partial(ST, requirements={"pytorch": ">=99"}), "requires torch>=99"),
    "version of Python": (partial(ST, requirements={"python": ">=4"}), "requires python>=4"),
    "two poolings": (partial(ST, pooling={"pooling_mode": ["mean", "cls"]}), "pools by mean and cls"),
    "old pooling": (partial(ST, pooling={"pooling_mode_max_tokens": True}), "pools by pooling_mode_max_tokens; set"),
    "new pooling": (partial(ST, pooling={"pooling_mode": "median"}), "pools by median"),
    "prompts left out": (partial(ST, pooling={"include_prompt": False}), "leaves prompts out of its pooling"),
    "Dense": (partial(ST, folders=[*SINGLE, "2_Dense"], kinds=["Transformer", "Pooling", "Dense"]), "has a Dense module"),
    "code of a module": (partial(ST, kinds=["own.Transformer", "Pooling"]), r"has a own\.Transformer module"),
    "damaged modules": (damaged, r"modules\.json is damaged"),
    "other modules": (partial(damaged, text='{"a": 1}'), r"modules\.json is damaged \(it holds a dict, not a list"),
    "damaged config": (partial(damaged, file="config.json"), "cannot be loaded"),
    "damaged tokenizer": (partial(damaged, file="tokenizer.json", text='{"version": "1.0"}'), "cannot be loaded"),
    "other pooling file": (partial(damaged, file="1_Pooling/config.json", text="[]"), "holds a list, not a dict"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_a_directory_that_cannot_be_read_exactly_is_refused_in_one_line(tmp_path, name):
    write, message = REFUSED[name]
    write(tmp_path / "model")
    for device in ("cpu", "meta"):
        with pytest.raises(InputError, match=message) as refused:
            InstructionEncoder.from_pretrained(tmp_path / "model", device=device)
        assert "\n" not in str(refused.value)
        assert str(tmp_path / "model") in str(refused.value)
