"""Steps of a U-Net: convolutions with batch norm, and values that wait long for the way up."""

from dataclasses import dataclass

from teraplan.library.builder import Tape
from teraplan.library.training import Forward, Parameters
from teraplan.library.transformers import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """The sizes of a U-Net."""

    levels: int
    channels: int
    """Of the first level; each further level has twice as many, on half the side."""
    image_channels: int
    classes: int


def unet(model: UNet, batch: Batch) -> Forward:
    """The forward of `batch.sequences` square images with sides of `batch.length` pixels."""

    def forward(tape: Tape, parameters: Parameters) -> None:
        images = batch.sequences

        def convolution(path: str, x: int, sizes: tuple[int, int, int], kernel: int = 3) -> int:
            before, after, side = sizes
            weight = parameters.get(f"{path}.weight", (after, before, kernel, kernel), path)
            return tape.op(
                "out",
                (x,),
                (images, after, side, side),
                graph=path,
                parameters=(weight,),
                saves=(x,),
                flops=2.0 * images * side * side * before * after * kernel * kernel,
            )

        def double(path: str, x: int, before: int, after: int, side: int) -> int:
            for number, width in enumerate((before, after)):
                name = f"{path}.{number}"
                x = convolution(f"{name}.convolution", x, (width, after, side))
                shape = (images, after, side, side)
                scale = parameters.get(f"{name}.norm.weight", (after,), name)
                x = tape.op("norm", (x,), shape, graph=name, parameters=(scale,), saves=(x,))
                x = tape.op("relu", (x,), shape, graph=name, saves_output=True)
            return x

        side, width = batch.length, model.channels
        shape = (images, model.image_channels, side, side)
        x = tape.op("image", (), shape, graph="", backward=False)
        before, waiting = model.image_channels, list[tuple[int, int, int]]()
        for level in range(model.levels):
            x = double(f"down.{level}", x, before, width, side)
            before = width
            if level < model.levels - 1:
                waiting.append((x, width, side))
                side, width = side // 2, width * 2
                shape = (images, before, side, side)
                x = tape.op("pool", (x,), shape, graph=f"down.{level}", saves=(x,))
        for level, (skipped, width, side) in reversed(list(enumerate(waiting))):
            path = f"up.{level}"
            x = convolution(f"{path}.up", x, (2 * width, width, side), kernel=2)
            shape = (images, 2 * width, side, side)
            x = tape.op("joined", (skipped, x), shape, graph=path)
            x = double(path, x, 2 * width, width, side)
        x = convolution("head", x, (model.channels, model.classes, batch.length), kernel=1)
        shape = (images, model.classes, batch.length, batch.length)
        tape.op("log_softmax", (x,), shape, graph="loss", saves_output=True)

    return forward
