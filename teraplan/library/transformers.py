"""Steps of transformers, written down as the operations that PyTorch runs without a compiler.

What each operation saves for its backward is what autograd saves there: a matrix product its input,
a norm its input and what it normalized, an activation function its input, a product both factors,
attention (the memory-efficient kernel) its inputs, its output and one number per row. Keys and
values are repeated for grouped queries, as torchtitan's Llama does.
"""

from dataclasses import dataclass

from teraplan.library.builder import Tape
from teraplan.library.training import Forward, Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of a transformer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    gated: bool = True
    """Three matrices in the feed-forward part, not two."""
    experts: int = 1
    active_experts: int = 1
    causal: bool = True
    first_stage_of: int = 1
    """Number of pipeline stages of which only the first is the step: no norm and no head then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.sequences * self.length


def transformer(model: Transformer, batch: Batch) -> Forward:
    """The forward of one micro-batch through `model`."""

    def forward(tape: Tape, parameters: Parameters) -> None:
        writer = Writer(tape, parameters)
        tokens = tape.op("tokens", (), (batch.tokens,), graph="", dtype="int64", backward=False)
        table = parameters.get("embedding.weight", (model.vocab, model.hidden), "embedding")
        x = tape.op(
            "out",
            (tokens,),
            (batch.tokens, model.hidden),
            graph="embedding",
            parameters=(table,),
            saves=(tokens,),
        )
        for index in range(model.layers // model.first_stage_of):
            x = block(writer, f"layers.{index}", x, model, batch)
        if model.first_stage_of == 1:
            x = writer.norm("norm", x, batch.tokens, model.hidden)
            writer.loss("lm_head", x, batch.tokens, model.hidden, model.vocab)

    return forward


class Writer:
    """Operations that the models share."""

    def __init__(self, tape: Tape, parameters: Parameters) -> None:
        self.tape = tape
        self.parameters = parameters

    def matmul(self, path: str, x: int, rows: int, columns: int, out: int) -> int:
        """A product with a parameter of (columns, out)."""
        weight = self.parameters.get(f"{path}.weight", (out, columns), path)
        return self.tape.op(
            "out",
            (x,),
            (rows, out),
            graph=path,
            parameters=(weight,),
            saves=(x,),
            flops=2.0 * rows * columns * out,
        )

    def norm(self, path: str, x: int, rows: int, columns: int) -> int:
        """A norm over columns, in two operations as without a compiler."""
        weight = self.parameters.get(f"{path}.weight", (columns,), path)
        shape = (rows, columns)
        normal = self.tape.op("normal", (x,), shape, graph=path, saves=(x,))
        return self.tape.op(
            "out", (normal,), shape, graph=path, parameters=(weight,), saves=(normal,)
        )

    def add(self, path: str, x: int, y: int, rows: int, columns: int) -> int:
        """A residual sum; saves nothing."""
        return self.tape.op("sum", (x, y), (rows, columns), graph=path)

    def loss(self, path: str, x: int, rows: int, columns: int, vocab: int) -> None:
        """A head and the cross entropy over `vocab`, computed in 32 bits."""
        logits = self.matmul(path, x, rows, columns, vocab)
        wide = self.tape.op("wide", (logits,), (rows, vocab), graph="loss", dtype="float32")
        self.tape.op(
            "log_softmax",
            (wide,),
            (rows, vocab),
            graph="loss",
            dtype="float32",
            saves_output=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes of an attention."""

    sequences: int
    length: int
    """Rows per sequence of the queries."""
    other_length: int
    """Rows per sequence of keys and values."""
    hidden: int
    inner: int
    """Columns of queries."""
    narrow: int
    """Columns of keys and values before they are repeated."""
    causal: bool


def attention(writer: Writer, path: str, x: int, source: int, sizes: AttentionSizes) -> int:
    """Attention of the value `x` over the value `source`."""
    rows, others = sizes.sequences * sizes.length, sizes.sequences * sizes.other_length
    q = writer.matmul(f"{path}.wq", x, rows, sizes.hidden, sizes.inner)
    k = writer.matmul(f"{path}.wk", source, others, sizes.hidden, sizes.narrow)
    v = writer.matmul(f"{path}.wv", source, others, sizes.hidden, sizes.narrow)
    tape = writer.tape
    if sizes.narrow != sizes.inner:
        k = tape.op("k", (k,), (others, sizes.inner), graph=path)
        v = tape.op("v", (v,), (others, sizes.inner), graph=path)
    part = 0.5 if sizes.causal else 1.0
    mixed = tape.op(
        "attention",
        (q, k, v),
        (rows, sizes.inner),
        graph=path,
        saves=(q, k, v),
        saves_output=True,
        flops=4.0 * rows * sizes.other_length * sizes.inner * part,
    )
    joined = tape.op("joined", (mixed,), (rows, sizes.inner), graph=path)
    return writer.matmul(f"{path}.wo", joined, rows, sizes.inner, sizes.hidden)


def block(writer: Writer, path: str, x: int, model: Transformer, batch: Batch) -> int:
    """One layer: attention and feed-forward, each with a norm before and a sum after."""
    rows, hidden = batch.tokens, model.hidden
    sizes = AttentionSizes(
        sequences=batch.sequences,
        length=batch.length,
        other_length=batch.length,
        hidden=hidden,
        inner=hidden,
        narrow=hidden * model.kv_heads // model.heads,
        causal=model.causal,
    )
    normal = writer.norm(f"{path}.attention_norm", x, rows, hidden)
    mixed = attention(writer, f"{path}.attention", normal, normal, sizes)
    x = writer.add(f"{path}.attention", x, mixed, rows, hidden)
    normal = writer.norm(f"{path}.ffn_norm", x, rows, hidden)
    if model.experts == 1:
        out = feed_forward(writer, f"{path}.ffn", normal, rows, model)
    else:
        out = _experts(writer, f"{path}.moe", normal, rows, model)
    return writer.add(f"{path}.ffn", x, out, rows, hidden)


def feed_forward(writer: Writer, path: str, x: int, rows: int, model: Transformer) -> int:
    """Two or three matrices with a function between them."""
    tape, shape = writer.tape, (rows, model.ffn)
    up = writer.matmul(f"{path}.w1", x, rows, model.hidden, model.ffn)
    made = tape.op("function", (up,), shape, graph=path, saves=(up,))
    if model.gated:
        gate = writer.matmul(f"{path}.w3", x, rows, model.hidden, model.ffn)
        made = tape.op("product", (made, gate), shape, graph=path, saves=(made, gate))
    return writer.matmul(f"{path}.w2", made, rows, model.ffn, model.hidden)


def _experts(writer: Writer, path: str, x: int, rows: int, model: Transformer) -> int:
    """A router, and experts that get equal shares of the tokens."""
    tape, hidden = writer.tape, model.hidden
    scores = writer.matmul(f"{path}.router", x, rows, hidden, model.experts)
    share = max(rows * model.active_experts // model.experts, 1)
    parts = [scores]
    for expert in range(model.experts):
        name = f"{path}.experts.{expert}"
        mine = tape.op("tokens", (x, scores), (share, hidden), graph=name)
        parts.append(feed_forward(writer, name, mine, share, model))
    return tape.op("joined", parts, (rows, hidden), graph=path, saves=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """The sizes of a T5."""

    layers: int
    """Of the encoder; the decoder has as many."""
    hidden: int
    ffn: int
    inner: int
    """Columns of queries, keys and values together."""
    vocab: int


def encoder_decoder(model: EncoderDecoder, batch: Batch) -> Forward:
    """The forward of one micro-batch; encoder and decoder see sequences of one length."""
    plain = Transformer(
        layers=model.layers,
        hidden=model.hidden,
        ffn=model.ffn,
        heads=1,
        kv_heads=1,
        vocab=model.vocab,
        gated=False,
    )

    def forward(tape: Tape, parameters: Parameters) -> None:
        writer, rows, hidden = Writer(tape, parameters), batch.tokens, model.hidden

        def embed(side: str) -> int:
            table = parameters.get("shared.weight", (model.vocab, hidden), "shared")
            tokens = tape.op(side, (), (rows,), graph="", dtype="int64", backward=False)
            return tape.op(
                side,
                (tokens,),
                (rows, hidden),
                graph="shared",
                parameters=(table,),
                saves=(tokens,),
            )

        def part(path: str, x: int, source: int | None, causal: bool) -> int:
            normal = writer.norm(f"{path}.norm", x, rows, hidden)
            sizes = AttentionSizes(
                sequences=batch.sequences,
                length=batch.length,
                other_length=batch.length,
                hidden=hidden,
                inner=model.inner,
                narrow=model.inner,
                causal=causal,
            )
            mixed = attention(writer, path, normal, normal if source is None else source, sizes)
            return writer.add(path, x, mixed, rows, hidden)

        def feed(path: str, x: int) -> int:
            normal = writer.norm(f"{path}.norm", x, rows, hidden)
            return writer.add(
                path, x, feed_forward(writer, path, normal, rows, plain), rows, hidden
            )

        x = embed("encoder")
        for index in range(model.layers):
            x = part(f"encoder.{index}.attention", x, None, causal=False)
            x = feed(f"encoder.{index}.ffn", x)
        memory = writer.norm("encoder.norm", x, rows, hidden)
        x = embed("decoder")
        for index in range(model.layers):
            x = part(f"decoder.{index}.attention", x, None, causal=True)
            x = part(f"decoder.{index}.cross", x, memory, causal=False)
            x = feed(f"decoder.{index}.ffn", x)
        x = writer.norm("decoder.norm", x, rows, hidden)
        writer.loss("lm_head", x, rows, hidden, model.vocab)

    return forward
