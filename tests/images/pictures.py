"""Random pictures in the formats and modes that people have, as encoded bytes."""

import io

import numpy as np
from PIL import Image

SHAPES = [(1, 1), (10_000, 60), (3, 500), (37, 1111), (512, 512), (1, 700)]


def odd_picture(number: int) -> bytes:
    """A picture of a random size: one of ten modes, some turned by EXIF, some animated."""
    draw = np.random.default_rng(number)
    width, height = SHAPES[number] if number < len(SHAPES) else (int(2**x) for x in draw.uniform(0, 10.5, 2))
    colors = draw.integers(0, 256, (height, width, 4), dtype=np.uint8)
    rgb, gray, file = Image.fromarray(colors[..., :3]), Image.fromarray(colors[..., 0]), io.BytesIO()
    exif = Image.Exif()
    if number % 7 == 0:
        exif[0x0112] = int(draw.integers(1, 9))
    match number % 10:
        case 0:
            rgb.save(file, "JPEG", exif=exif)
        case 1:
            gray.save(file, "WEBP", exif=exif)
        case 2:
            frame = rgb.quantize(17)
            frame.save(
                file, "GIF", save_all=number % 3 == 0, append_images=[frame.rotate(90)] if number % 3 == 0 else []
            )
        case 3:
            Image.fromarray(colors).save(file, "PNG", exif=exif)
        case 4:
            rgb.convert("CMYK").save(file, "JPEG", exif=exif)
        case 5:
            Image.fromarray(colors[..., 0].astype(np.uint16) * 257).save(file, "PNG")
        case 6:
            gray.convert("1").save(file, "TIFF", exif=exif)
        case 7:
            Image.fromarray(colors).convert("LA").save(file, "PNG", exif=exif)
        case 8:
            Image.fromarray(colors).quantize(13).save(file, "PNG", exif=exif)
        case 9:
            rgb.quantize(9).save(file, "PNG", transparency=3)
    return file.getvalue()
