"""Upright pixels of an image, in RGB or gray. Images are converted in strips of rows, to save memory.

Values of 16 bits are scaled to 8, as Pillow does for colors of 16 bits. Images whose values have no known range are
refused: 32-bit integers, signed integers and fractions.
"""

import numpy as np
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from lean_ft.images.cuts import Size
from lean_ft.images.decoding_limits import RefusedImage

_STRIP_PIXELS = 1 << 20
_ORIENTATION = 0x0112
# Orientation -> the operation that makes an image upright, whether it swaps the axes, and whether columns and rows of
# the stored image are counted from their end.
_TURNS = {
    2: (Image.Transpose.FLIP_LEFT_RIGHT, False, True, False),
    3: (Image.Transpose.ROTATE_180, False, True, True),
    4: (Image.Transpose.FLIP_TOP_BOTTOM, False, False, True),
    5: (Image.Transpose.TRANSPOSE, True, False, False),
    6: (Image.Transpose.ROTATE_270, True, False, True),
    7: (Image.Transpose.TRANSVERSE, True, True, True),
    8: (Image.Transpose.ROTATE_90, True, True, False),
}
_OF_16_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_UNKNOWN_RANGE = {"I": "signed integers or integers of 32 bits", "F": "fractions"}
_BITS, _COLORS = 258, 262  # tags of TIFF
_WHITE_IS_ZERO = 0
# Of PNG: Pillow scales gray values of 2 and 4 bits to 8, but not the transparent value.
_GRAY_STEPS = {"L;2": 85, "L;4": 17}


def check_colors(image: Image.Image) -> None:
    """Raise RefusedImage if the colors of an image are not known from its file."""
    if image.mode in _UNKNOWN_RANGE:
        raise RefusedImage(
            f"its values are {_UNKNOWN_RANGE[image.mode]}, whose range is not known. Scale them to unsigned integers "
            "of 8 or 16 bits."
        )


def orientation(image: Image.Image) -> int:
    """The orientation by EXIF, from 1 to 8."""
    if isinstance(image, TiffImageFile):  # Pillow turns these itself
        return 1
    try:
        found = Image.Image.getexif(image).get(_ORIENTATION, 1)  # PngImageFile.getexif decodes the image
        return found if found in _TURNS else 1
    except Exception:  # broken metadata raises many kinds of errors, and pixels do not need it
        return 1


def is_gray(image: Image.Image) -> bool:
    """Whether an image has one color and no transparency. It is resized in gray, which takes a quarter of the
    memory."""
    return image.mode in ("1", "L", *_OF_16_BITS) and not image.has_transparency_data


def is_upright(image: Image.Image) -> bool:
    """Whether an image has upright pixels in gray or RGB as it is stored."""
    return orientation(image) not in _TURNS and image.mode in ("L", "RGB") and not image.has_transparency_data


class Upright:
    """A decoded image, held as it is stored, that returns upright pixels on white. `whole` closes the image of a file
    once it has converted it, to free its memory."""

    def __init__(self, image: Image.Image) -> None:
        check_colors(image)
        self._turn, self._bits, self._is_inverted = _TURNS.get(orientation(image)), 16, False
        if isinstance(image, TiffImageFile):
            image.filename = ""  # with a name, Pillow maps the file, and gets a turned image wrong
            if image.mode in _OF_16_BITS:
                self._bits = image.tag_v2[_BITS][0]
                self._is_inverted = image.tag_v2.get(_COLORS) == _WHITE_IS_ZERO
        elif isinstance(image, PngImageFile) and image.tile and isinstance(image.info.get("transparency"), int):
            image.info["transparency"] *= _GRAY_STEPS.get(str(image.tile[0][3]), 1)
        image.load()
        vars(image).pop("_decoder", None)  # WebP's decoder holds twice the image
        self._image, self._mode = image, "L" if is_gray(image) else "RGB"
        width, height = image.size
        self.size = Size(height, width) if self._turn is not None and self._turn[1] else Size(width, height)

    def crop(self, box: tuple[int, int, int, int]) -> Image.Image:
        """The RGB pixels of a box (left, top, right, bottom)."""
        part = self._crop(*box)
        return part if part.mode == "RGB" else part.convert("RGB")

    def resized(self, size: tuple[int, int], filter: int) -> "Upright":
        """The image in another size."""
        return self if self.size == size else Upright(self.whole().resize(size, filter))

    def whole(self) -> Image.Image:
        """The whole image, in gray or RGB."""
        if not is_upright(self._image):
            whole, (width, height) = Image.new(self._mode, self.size), self.size
            rows = max(1, _STRIP_PIXELS // width)
            for top in range(0, height, rows):
                whole.paste(self._crop(0, top, width, min(top + rows, height)), (0, top))
            if isinstance(self._image, ImageFile.ImageFile):
                self._image.close()
            self._image, self._turn = whole, None
        return self._image

    def _crop(self, left: int, top: int, right: int, bottom: int) -> Image.Image:
        """The pixels of a box, in gray or RGB."""
        if self._turn is None:
            return self._converted(self._image.crop((left, top, right, bottom)))
        turn, swaps, from_right, from_bottom = self._turn
        if swaps:
            left, top, right, bottom = top, left, bottom, right
        if from_right:
            left, right = self._image.width - right, self._image.width - left
        if from_bottom:
            top, bottom = self._image.height - bottom, self._image.height - top
        return self._converted(self._image.crop((left, top, right, bottom))).transpose(turn)

    def _converted(self, part: Image.Image) -> Image.Image:
        """Pixels in gray or RGB, on white where they are transparent."""
        if part.mode in _OF_16_BITS:
            part = self._of_8_bits(part)
        if not part.has_transparency_data:
            return part if part.mode == self._mode else part.convert(self._mode)
        part = (part.convert("LA") if part.mode == "La" else part).convert("RGBA")
        if part.getchannel("A").getextrema() != (255, 255):
            part = Image.alpha_composite(Image.new("RGBA", part.size, "white"), part)
        return part.convert("RGB")

    def _of_8_bits(self, part: Image.Image) -> Image.Image:
        """Convert gray pixels of 16 bits to their upper 8 bits."""
        values = np.asarray(part)
        gray = (values >> (self._bits - 8)).astype(np.uint8)
        pixels = Image.fromarray(255 - gray if self._is_inverted else gray)
        if (transparent := part.info.get("transparency")) is not None:
            pixels.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
        return pixels
