"""Small forward passes over the loaded modules of transformers that decide which tier computes a model.

The tier paged computes packed rows with this backend's attention and states. A model whose own logits differ from its
result is computed by the tier plain: its own forward pass over rows of one length.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Attend, KeySize, Scores, Shape, within
from retrain_local.model.experts import Routers, find_routers
from retrain_local.model.hf_decoder import CACHES, HfDecoder, body_path, cache_argument
from retrain_local.model.plain import PackedRows, PlainDecoder, RowStep
from retrain_local.model.states import BARE, Mixed, Mixer, Mixers, Pieces, PromptMix, States, StepMix, tensors_in
from retrain_local.model.written import PASSAGE, Marked, Mask, Passage, UnsupportedAttentionError

ATTENTION = "retrain"
# Two rows of 9 and 7 tokens that share their first four.
SPANS = Spans(lengths=(4, 5, 3), prefixes=(-1, 0, 0))
TOLERANCE = {torch.float32: 1e-3}  # of the norm of the logits
LOOSE = 0.1  # in bf16, where routing may pick other experts
# `Attend` has the masks of these layers. Other masks (indexed or compressed keys) do not show in rows this short.
CHUNKED = "chunked_attention"
MASKS = frozenset({CHUNKED, "full_attention", "sliding_attention", "attention", "hybrid", "hybrid_sliding"})
# A row in pieces: a prompt, several more tokens, then token by token. Some layers read several only without a state.
PIECES, STEPS = (4, 3, 1, 1), (4, 1, 1, 1, 1, 1)
STORED = 1, 6, 1, 1  # a state that is as large after one token grows no more


class NotCausalError(Exception):
    """A token's logits depend on later tokens."""


class VaryingLogitsError(Exception):
    """The model's own forward pass gives the same row other logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The chosen tier of a model, its attention modules in order, and its `mixers`, the layers with another state.

    `routers` choose a mixture's experts. `first_position` is the position of a row's first token: some models begin
    behind their padding id. `why` is the reason against the tier paged, or empty. The other fields describe a
    `PlainDecoder`.
    """

    shape: Shape
    attention: tuple[str, ...] = ()
    mixers: Mixers | None = None
    routers: Routers | None = None
    first_position: int = 0
    why: str = ""
    cache: str = ""
    is_whole: bool = False
    pads: bool = True
    is_reentrant: bool = True

    @property
    def mixing(self) -> tuple[str, ...]:
        """The modules through which a token sees others."""
        layers = self.mixers.layers if self.mixers and not self.mixers.is_body else ()
        return (*self.attention, *(layer.name for layer in layers))

    def decoder(self, model: Any, paged: type[HfDecoder] = HfDecoder, plain: type[PlainDecoder] = PlainDecoder) -> Any:
        """Return `model` as a decoder of its tier, of the class given for it."""
        if self.why:
            decoder: HfDecoder = plain(model, cache=self.cache, is_whole=self.is_whole, pads=self.pads)
            decoder.is_reentrant = self.is_reentrant
        else:
            _use(ATTENTION, model)
            decoder = paged(model, self.mixers, self.first_position)
            if self.routers:
                self.routers.attach(model)
                decoder.routers = self.routers
        decoder.shape = self.shape
        return decoder


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Replace attention in transformers, with tensors [1, heads, N, size]."""
    passage = PASSAGE.get()
    if passage is None:
        raise UnsupportedAttentionError("its layers are not given the cache")
    if not isinstance(attention_mask, Mask | None):
        raise UnsupportedAttentionError("it builds its own attention masks")
    scale, window = given.get("scaling"), given.get("sliding_window")
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=getattr(attention_mask, "window", None) if window is None else window,
        chunk=getattr(attention_mask, "chunk", None),
        softcap=given.get("softcap"),
        sinks_H=given.get("s_aux"),
    )
    return passage.attended(query, key, value, scores)[None], None


def _kind(module: nn.Module) -> str:
    """Return the layer type of this attention in the configuration."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None) or ()
    return types[index] if isinstance(index, int) and index < len(types) else "full_attention"


def _use(name: str, model: Any) -> None:
    """Let all parts of the model find their attention by this name, also the parts that write out their own."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation_internal = name


@dataclass(slots=True, eq=False)
class Recorder:
    """An `Attend` that records the calls of attention: the innermost module that has the cache, and its numbers."""

    attend: Attend
    given: list[nn.Module] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    heads: int = 0
    sizes: list[KeySize] = field(default_factory=list)

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        _, kv_heads, size = keys_NKD.shape
        self.modules.append(self.given[-1])
        self.heads = max(self.heads, queries_NHD.shape[1])
        self.sizes.append(KeySize(kv_heads=kv_heads, head_size=size, value_size=values_NKD.shape[2]))
        return self.attend(layer, queries_NHD, keys_NKD, values_NKD, scores)


class Recording(Passage):
    """Added to the class of a cache of transformers: its keys and values lead to a `Recorder`."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)  # type: ignore[misc]
        return keys.as_subclass(Marked), values.as_subclass(Marked)


def choose_route(model: Any) -> Route:
    """Return the first tier whose logits are the model's own; NotCausalError or VaryingLogitsError if none is."""
    AttentionInterface.register(ATTENTION, attention)
    AttentionMaskInterface.register(ATTENTION, Mask.of)
    before = model.config._attn_implementation
    vocabulary = model.get_input_embeddings().num_embeddings
    ids_N = (torch.arange(SPANS.num_tokens, device=model.device) * 7919 + 17) % vocabulary
    rows = _rows_of(ids_N)
    with torch.no_grad():
        own, again = ([model(input_ids=row[None], use_cache=False).logits[0] for row in rows] for _ in range(2))
        if _gap(again, own) > _tolerance(model.dtype):
            raise VaryingLogitsError
        shorter = model(input_ids=rows[0][None, :5], use_cache=False).logits[0]
        if _gap([shorter], [own[0][:5]]) > _tolerance(model.dtype):
            raise NotCausalError
        first = _first_position(model, rows[0])
        why = ""
        for route in _paged, _stateful:
            try:
                return route(model, ids_N, rows[0], own, first)
            # The code of an architecture may raise errors of any class.
            except Exception as error:
                kind = "" if isinstance(error, UnsupportedAttentionError) else f"{type(error).__name__}: "
                why = why or f"{kind}{error}"
            for module in model.modules():
                module.__dict__.pop("forward", None)
            _use(before, model)
        return _plain(model, ids_N, rows[0], own, first, why)


def _first_position(model: Any, row_T: Tensor) -> int:
    """Return the number that the model's embedding of positions is given for the first token of a row."""
    positions_1T, found = torch.arange(len(row_T), device=row_T.device)[None], 0

    def note(module: nn.Module, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        nonlocal found
        if type(module) is nn.Embedding and args and torch.equal(args[0] - args[0][..., :1], positions_1T):
            found = int(args[0][0, 0])

    with _hooked(model, note, lambda *_: None):
        model(input_ids=row_T[None], use_cache=False)
    return found


def _rows_of(packed_N: Tensor) -> list[Tensor]:
    """Return both rows of a tensor of the packed tokens."""
    shared, *endings = packed_N.split(SPANS.lengths)
    return [torch.cat([shared, ending]) for ending in endings]


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, LOOSE)


def _gap(found: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """Return the largest distance of logits from the model's own, relative to their norm; NaN counts as infinite."""
    gaps = [float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, own, strict=True)]
    return max(gap if gap == gap else float("inf") for gap in gaps)


def _paged(model: Any, ids_N: Tensor, row_T: Tensor, own: list[Tensor], first: int) -> Route:
    cache = None
    with suppress(ValueError):  # transformers' cache counts no tokens where no layer has attention
        cache = getattr(model(input_ids=row_T[None], use_cache=True), CACHES[0], None)
    is_other = isinstance(cache, DynamicCache) and type(cache) is not DynamicCache
    empty = type(cache) if is_other else partial(DynamicCache, config=model.config.get_text_config(decoder=True))
    _use(ATTENTION, model)
    device, alone = model.device, Spans.apart((len(row_T),))
    plain = HfDecoder(model, None, first)
    recorder = Recorder(PaddedAttend(alone, device))
    mixers = _mixers(plain._body, model, row_T, recorder, empty)
    if not recorder.modules and not mixers:
        raise UnsupportedAttentionError("it calls no attention function of transformers")
    names = {id(module): name for name, module in model.named_modules()}
    if kinds := {_kind(module) for module in recorder.modules} - MASKS:
        raise UnsupportedAttentionError(f"its layers of {', '.join(kinds)} need a mask that only it can make")
    decoder = HfDecoder(model, mixers, first) if mixers else plain
    width = _packed(decoder, ids_N, own)
    if mixers:
        mixers = _continued(decoder, mixers, row_T, own[0])
    shape = _shape(model, width, own[0].shape[-1], heads=recorder.heads or 1, sizes=recorder.sizes, first=first)
    shape = replace(shape, row_bytes=mixers.row_bytes if mixers else 0)
    routers = find_routers(model, partial(_packed, decoder, ids_N, own))
    calls = tuple(names[id(module)] for module in recorder.modules)
    return Route(shape=shape, attention=calls, mixers=mixers, routers=routers, first_position=first)


def _packed(decoder: HfDecoder, ids_N: Tensor, own: list[Tensor]) -> int:
    """Return the hidden size; UnsupportedAttentionError if packed rows have other logits than the model's own."""
    positions_N, attend = torch.from_numpy(SPANS.positions()).to(decoder.device), decoder.packed(PaddedAttend)
    hidden_ND = decoder.hidden(ids_N, positions_N, attend(SPANS, decoder.device))
    gap = _gap(_rows_of(decoder.logits(hidden_ND)), own)
    if gap > _tolerance(decoder.dtype):
        raise UnsupportedAttentionError(f"without padding its logits differ by {gap:.2g} of their size from its own")
    return int(hidden_ND.shape[1])


def _stateful(model: Any, ids_N: Tensor, row_T: Tensor, own: list[Tensor], first: int) -> Route:
    """Return the route of a body that returns its state, of the same size after every row, in any form."""
    body = Mixer(name=body_path(model), kept=None)
    mixers = Mixers(layers=(body,), empty=partial(SimpleNamespace, kept=None), is_body=True)
    decoder, pieces = HfDecoder(model, mixers), Pieces(mixers, (len(row_T),))
    decoder.hidden(row_T, row_T, Mixed(PaddedAttend(SPANS, model.device), pieces))
    if not tensors_in(pieces.kept[0]):
        raise UnsupportedAttentionError("it keeps no state")
    layers = (replace(body, kept=pieces.kept[0]),)
    shape = _shape(model, _packed(decoder, ids_N, own), own[0].shape[-1], heads=1, sizes=(), first=first)
    for is_batched, is_chunked in product((True, False), (True, False)):
        decoder.mixers = replace(mixers, layers=layers, is_batched=is_batched, is_chunked=is_chunked)
        with suppress(Exception):
            if _gap([_stored(decoder, row_T)], own[:1]) <= _tolerance(model.dtype):
                return Route(shape=replace(shape, row_bytes=decoder.mixers.row_bytes), mixers=decoder.mixers)
    raise UnsupportedAttentionError("it cannot continue from a stored state")


def _stored(decoder: HfDecoder, row_T: Tensor) -> Tensor:
    """Return the logits of a row that is read in pieces, with stored states, together with another row."""
    assert decoder.mixers is not None
    states, rows_2T = States(decoder.mixers, 3, row_T.device), torch.stack([row_T, row_T.flip(0)])
    step, hidden, done = StepMix(states, (1, 2)), [], 0
    for length in STORED:
        ids_N = rows_2T[:, done : done + length].flatten()
        prompts = PromptMix(states, (1, 2), (length, length), continues=done > 0)
        mix = Mixed(PaddedAttend(SPANS, row_T.device), step if done and length == 1 else prompts)
        hidden.append(decoder.hidden(ids_N, ids_N, mix)[:length])
        done += length
    return decoder.logits(torch.cat(hidden))


def _mixers(body: Any, model: Any, row_T: Tensor, recorder: Recorder, empty: Callable[[], Any]) -> Mixers | None:
    """Find the innermost modules that leave a state in the cache and do not call `recorder`."""
    given: list[nn.Module] = []
    sizes, keeping = list[int](), set[int]()
    cache = empty()
    cache.__class__ = type("Recording", (Recording, type(cache)), {})
    cache.attend, cache.positions_N = recorder, torch.arange(len(row_T), device=row_T.device)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(each is cache for each in (*args, *kwargs.values())):
            given.append(module)
            recorder.given.append(module)
            sizes.append(len(tensors_in(cache)))

    def end(module: nn.Module, *_: Any) -> None:
        if recorder.given and recorder.given[-1] is module:
            recorder.given.pop()
            if len(tensors_in(cache)) > sizes.pop():
                keeping.add(id(module))

    positions_1T = torch.arange(len(row_T), device=row_T.device)[None]
    argument = cache_argument(body)
    with _hooked(body, begin, end), within(PASSAGE, cache):
        body(input_ids=row_T[None], position_ids=positions_1T, use_cache=True, **{argument: cache})
    receivers = {id(module) for module in given}
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for module in given:
        inner = any(id(child) in receivers for child in module.modules() if child is not module)
        # A state stored in the module would change the logits of packed rows.
        if not inner and id(module) in keeping and all(module is not each for each in recorder.modules):
            found.append(Mixer(name=names[id(module)], kept=None))
    if len({mixer.name for mixer in found}) < len(found):
        raise UnsupportedAttentionError("it calls the same layer with a state several times")
    if not found:
        return None
    mixers = Mixers(layers=tuple(found), empty=empty)
    pieces = Pieces(mixers, (len(row_T),))
    attend = Mixed(PaddedAttend(Spans.apart((len(row_T),)), row_T.device), pieces)
    HfDecoder(model, mixers).hidden(row_T, positions_1T[0], attend)
    for layer in (each for cache in pieces.kept.values() for each in cache.layers if not tensors_in(each)):
        setattr(layer, BARE, True)  # most layers of the caches, each of which holds one mixer's state
    kept = (replace(mixer, kept=pieces.kept[number]) for number, mixer in enumerate(mixers.layers))
    return replace(mixers, layers=tuple(kept))


def _hooked(body: nn.Module, begin: Any, end: Any) -> ExitStack:
    hooks = ExitStack()
    for module in body.modules():
        if module is not body:
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(end))
    return hooks


def _continued(decoder: HfDecoder, mixers: Mixers, row_T: Tensor, own_TV: Tensor) -> Mixers:
    """Return `mixers` with `is_chunked` by a trial; UnsupportedAttentionError if they cannot continue from a state."""
    positions_T = torch.arange(len(row_T), device=row_T.device)
    attend = PaddedAttend(Spans.apart((len(row_T),)), row_T.device)

    def is_own(lengths: Sequence[int], **given: bool) -> bool:
        hidden = decoder.hidden(row_T, positions_T, Mixed(attend, Pieces(mixers, lengths, **given)))
        return _gap([decoder.logits(hidden)], [own_TV]) <= _tolerance(decoder.dtype)

    if not is_own((1,) * len(row_T), from_zeros=True):  # as the slot of a row without an earlier token is
        raise UnsupportedAttentionError("its layers do not begin from a state of zeros")
    for lengths in (PIECES, STEPS):
        if is_own(lengths):
            return replace(mixers, is_chunked=lengths is PIECES)
    raise UnsupportedAttentionError("its layers cannot continue from a stored state")


def _plain(model: Any, ids_N: Tensor, row_T: Tensor, own: list[Tensor], first: int, why: str) -> Route:
    hidden = model.config.get_text_config(decoder=True).hidden_size
    shape = _shape(model, hidden, own[0].shape[-1], heads=1, sizes=(), first=first)
    route = Route(shape=shape, first_position=first, why=why, is_reentrant=_is_reentrant(model, row_T))
    route = _uncached(model, ids_N, own, route)
    for cache in CACHES:
        found = replace(route, cache=cache)
        try:
            sizes = _cached(found.decoder(model), row_T, own[0])
        except Exception:
            continue
        if sizes is not None:
            return replace(found, shape=replace(route.shape, token_bytes=sizes[0], row_bytes=sizes[1]))
    return replace(route, shape=replace(route.shape, token_bytes=8))  # an id


def _is_reentrant(model: Any, row_T: Tensor) -> bool:
    """Return False if a forward pass leaves other tensors in the modules than the one before it."""

    def left() -> list[Tensor]:
        model(input_ids=row_T[None], use_cache=False)
        return [x for module in model.modules() for x in vars(module).values() if isinstance(x, Tensor)]

    before, after = left(), left()
    return len(before) == len(after) and all(map(operator.is_, before, after))


def _uncached(model: Any, ids_N: Tensor, own: list[Tensor], route: Route) -> Route:
    """Return `route` with the fastest way of packing whose logits are the model's own."""
    # From the fastest to the model's unchanged forward pass.
    for is_whole, pads in ((False, True), (False, False), (True, True), (True, False)):
        found = replace(route, is_whole=is_whole, pads=pads)
        try:
            decoder = found.decoder(model)
            hidden_ND = decoder.hidden(ids_N, ids_N, PackedRows(SPANS, model.device, pads=pads))
            rows = _rows_of(decoder.logits(hidden_ND))
        except Exception:
            continue
        if _gap(rows, own) <= _tolerance(model.dtype):
            return replace(found, shape=replace(route.shape, hidden=hidden_ND.shape[1]))
    raise VaryingLogitsError


def _cached(decoder: PlainDecoder, row_T: Tensor, own_TV: Tensor) -> tuple[int, int] | None:
    """Return the bytes that the model's cache takes for a token and for a row; None if its logits differ."""
    prompt_1T = row_T[None, :4]
    kept, others = (decoder.continued(each, None)[1] for each in (prompt_1T, prompt_1T.flip(0)))
    if kept is None:
        return None
    before = sum(tensor.nbytes for tensor in tensors_in(kept))
    step = RowStep([kept, others])
    hidden = [step.hidden(decoder, token.expand(2)) for token in row_T[4:]]
    step.drop(torch.tensor([1], device=row_T.device))
    grown = sum(tensor.nbytes for tensor in tensors_in(step.of_row(0)))
    logits = torch.stack([decoder.logits(each)[1] for each in hidden])
    if _gap([logits], [own_TV[4:]]) > _tolerance(decoder.dtype):
        return None
    each = max(0, grown - before) // len(row_T[4:])
    return each, max(0, before - 4 * each)


def _shape(model: Any, hidden: int, vocabulary: int, *, heads: int, sizes: Sequence[KeySize], first: int) -> Shape:
    text = model.config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    keeping = tuple(sizes)
    layers = getattr(text, "num_hidden_layers", None) or len(keeping)
    context = getattr(text, "max_position_embeddings", None)
    return Shape(
        layers=layers,
        heads=heads,
        kv_heads=max((size.kv_heads for size in sizes), default=1),
        head_size=max((size.head_size for size in sizes), default=1),
        value_size=max((size.value_size for size in sizes), default=1),
        hidden=hidden,
        inner=max(inner) if isinstance(inner, (list, tuple)) else inner,
        vocabulary=vocabulary,
        context=context and context - first,
        parameters=sum(p.numel() for p in model.parameters()),
        has_chunks=CHUNKED in (getattr(text, "layer_types", None) or ()),
        keeping=None if len(set(keeping)) == 1 and len(keeping) == layers else keeping,
    )
