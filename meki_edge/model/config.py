"""``config.json``: Hugging Face's Qwen3 fields, plus which memories sit in which layers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from os import PathLike
from typing import Any

from meki_edge import config, memory
from meki_edge.errors import UserError, nearest
from meki_edge.model_shape import ModelShape

FILE_NAME = "config.json"
TRAINING_FORM = "training"
ROM_FORM = "rom"
MAX_SIZE = 2**40

DENSE_TYPE, MOE_TYPE = "qwen3", "qwen3_moe"

# Keys of a Qwen3 config.json that change the mathematics, with the only values supported here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": (DENSE_TYPE, MOE_TYPE),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "use_sliding_window": (False,),
    "sliding_window": (None,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
# Keys that say nothing about the forward pass.
_IGNORED = frozenset(
    "architectures bos_token_id pad_token_id dtype torch_dtype transformers_version use_cache "
    "max_window_layers layer_types _name_or_path output_router_logits".split()
)
# What a mixture of experts must say, and what else belongs to one.
_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_MOE_FIELDS = (*_MOE_SIZES, "norm_topk_prob", "router_aux_loss_coef")


@dataclass(frozen=True, kw_only=True)
class MemoryPlacement:
    """One memory ``kind`` with its ``options``, in each of ``layers`` (0-based)."""

    kind: str
    layers: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A backbone and its memories.

    ``memory_form`` is ``training`` (tables and projections present) or ``rom`` (rows come from a
    ROM file). Dense is simply the empty tuple of memories. With ``num_experts`` every layer's
    feed-forward network is a mixture of experts (Hugging Face's ``Qwen3MoeConfig``), and
    ``intermediate_size`` is unused.
    """

    eos_token_id: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    """How many experts each token goes through."""
    moe_intermediate_size: int | None = None
    """Inner width of one expert."""
    norm_topk_prob: bool = False
    """Whether the chosen experts' weights are scaled to sum to one."""
    router_aux_loss_coef: float = 0.001
    """The weight of the balancing loss in training."""
    memories: tuple[MemoryPlacement, ...] = ()
    memory_form: str = TRAINING_FORM

    @property
    def folded(self) -> bool:
        """Whether the memories are in ROM form."""
        return self.memory_form == ROM_FORM

    def build_memories(self, layer: int) -> list[memory.MemoryLayer]:
        """The memories of one decoder layer, in the order of ``memories``."""
        return [
            memory.build(
                placement.kind,
                placement.options,
                self,
                memory.Slot(layer=layer, layers=placement.layers),
                folded=self.folded,
            )
            for placement in self.memories
            if layer in placement.layers
        ]


def parse(values: Any, where: str | PathLike[str]) -> ModelConfig:
    """A :class:`ModelConfig` from a parsed ``config.json``, strictly.

    Raises:
        UserError: an unknown key (the nearest known one is named), a wrong type, an unsupported
            architecture or RoPE variant, or sizes that do not fit together.
    """
    if not isinstance(values, dict):
        raise UserError("expected a JSON object", where=where, fix="give a Hugging Face config.json")
    values = dict(values)
    _take_rope(values, where)
    if "num_local_experts" in values:  # as `transformers` 5 writes it
        values.setdefault("num_experts", values.pop("num_local_experts"))
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    kept = {}
    for key, value in values.items():
        if key in known:
            kept[key] = value
        elif key in _FIXED:
            if value not in _FIXED[key]:
                raise UserError(
                    f"{key} = {value!r} is not supported (only {_FIXED[key][0]!r})",
                    where=where,
                    fix="use a Qwen3-architecture model without this variant",
                )
        elif key not in _IGNORED:
            raise UserError(
                f"unknown key {key!r}{nearest(key, known | set(_FIXED))}",
                where=where,
                fix=f"known keys: {', '.join(sorted(known))}",
            )
    if isinstance(kept.get("eos_token_id"), list):
        kept["eos_token_id"] = next(iter(kept["eos_token_id"]), None)
    _check_model_type(values, where)
    parsed = config.from_dict(ModelConfig, kept, where)
    return check(parsed, where)


def to_json(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` object; without memories it is one that `transformers` loads as it is."""
    values = config.to_dict(model)
    if not model.memories:
        del values["memories"], values["memory_form"]
    if model.num_experts is None:
        for name in _MOE_FIELDS:
            del values[name]
    return {
        "architectures": ["Qwen3ForCausalLM" if model.num_experts is None else "Qwen3MoeForCausalLM"],
        "model_type": DENSE_TYPE if model.num_experts is None else MOE_TYPE,
        "hidden_act": "silu",
        "attention_bias": False,
        **values,
    }


def check(model: ModelConfig, where: str | PathLike[str]) -> ModelConfig:
    """Return ``model`` with its memories' options validated; raise :class:`UserError` if sizes clash."""

    def wrong(what: str, fix: str) -> UserError:
        return UserError(what, where=where, fix=fix)

    for field in dataclasses.fields(ModelShape):
        value = getattr(model, field.name)
        if not isinstance(value, bool) and not 0 < value < MAX_SIZE:
            raise wrong(f"{field.name} is {value}", f"give a positive {field.name} below {MAX_SIZE:.0e}")
    if model.num_attention_heads % model.num_key_value_heads:
        raise wrong(
            f"num_attention_heads {model.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {model.num_key_value_heads}",
            "make the heads divide evenly into key/value groups",
        )
    if model.head_dim % 2 or model.hidden_size % 2:
        raise wrong("head_dim and hidden_size must be even", "RoPE and the MeKi projector split them in halves")
    sizes = {name: getattr(model, name) for name in _MOE_SIZES}
    if any(size is not None for size in sizes.values()):
        bad = [f"{name} is {size}" for name, size in sizes.items() if size is None or size <= 0]
        if bad:
            raise wrong(", ".join(bad), "give a mixture of experts all three, positive, or none of them")
        if sizes["num_experts_per_tok"] > sizes["num_experts"]:
            raise wrong(
                f"num_experts_per_tok is {model.num_experts_per_tok}, but num_experts is {model.num_experts}",
                "choose at most as many experts as there are",
            )
    if model.eos_token_id is not None and not 0 <= model.eos_token_id < model.vocab_size:
        raise wrong(f"eos_token_id is {model.eos_token_id}", f"give an id below vocab_size {model.vocab_size}")
    if model.memory_form not in (TRAINING_FORM, ROM_FORM):
        raise wrong(f"memory_form is {model.memory_form!r}", f"use {TRAINING_FORM!r} or {ROM_FORM!r}")
    placements = []
    for index, placement in enumerate(model.memories):
        field = f"{where}: memories[{index}]"
        bad = [layer for layer in placement.layers if not 0 <= layer < model.num_hidden_layers]
        if bad or not placement.layers or len(set(placement.layers)) != len(placement.layers):
            raise UserError(
                f"layers {list(placement.layers)} do not name distinct layers of 0…{model.num_hidden_layers - 1}",
                where=field,
                fix="list existing layers, each once",
            )
        options = memory.check_options(placement.kind, placement.options, f"{field}.options")
        placements.append(dataclasses.replace(placement, options=options))
    return dataclasses.replace(model, memories=tuple(placements))


def _check_model_type(values: dict[str, Any], where: str | PathLike[str]) -> None:
    """A ``model_type``, where it is given, and the experts' fields say the same."""
    given = values.get("model_type", MOE_TYPE if "num_experts" in values else DENSE_TYPE)
    odd = [name for name in _MOE_FIELDS if (name in values) != (given == MOE_TYPE)]
    if given == MOE_TYPE:
        odd = [name for name in odd if name in _MOE_SIZES]
    if odd:
        raise UserError(
            f"{', '.join(odd)} {'missing from' if given == MOE_TYPE else 'in'} a config.json of model_type {given!r}",
            where=where,
            fix=f"a mixture of experts has model_type {MOE_TYPE!r} and gives {', '.join(_MOE_SIZES)}",
        )


def _take_rope(values: dict[str, Any], where: str | PathLike[str]) -> None:
    """Replace what says how positions are rotated by ``rope_theta``; refuse everything but plain RoPE.

    `transformers` 5 writes ``rope_parameters``, earlier versions a ``rope_scaling`` that is null or names a
    variant by ``rope_type`` or ``type``. Long-context variants (linear, dynamic, yarn, longrope, llama3) turn
    other angles and scale the scores, so a model would compute nonsense without them.
    """
    for key in ("rope_parameters", "rope_scaling"):
        given = values.pop(key, None)
        if given is None:
            continue
        known = isinstance(given, dict) and given.keys() <= {"rope_type", "type", "rope_theta"}
        if not known or any(given.get(name, "default") != "default" for name in ("rope_type", "type")):
            kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
            named = f"the RoPE variant {kind!r}" if kind not in (None, "default") else "another RoPE than the plain one"
            raise UserError(
                f"{key} asks for {named}, which is not supported: {given!r}",
                where=where,
                fix="use a model with plain RoPE; a shorter context does not make up for a variant",
            )
        if "rope_theta" in given:
            values["rope_theta"] = given["rope_theta"]
