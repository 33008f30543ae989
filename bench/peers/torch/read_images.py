#!/usr/bin/env python3
"""What bench/micro's ReadImage does, with Pillow and torchvision on one thread: images a second.

    python3 bench/peers/torch/read_images.py [SECONDS]      # needs Pillow, torchvision, NumPy
"""
import io
import sys
import time

import numpy
import torch
from PIL import Image, features
from torchvision import io as torchvision_io
from torchvision import transforms
from torchvision.transforms import v2

WIDTH, HEIGHT, SIZE = 500, 375, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def jpeg():
    y, x, c = numpy.meshgrid(numpy.arange(HEIGHT), numpy.arange(WIDTH), numpy.arange(3), indexing="ij")
    noise = numpy.random.default_rng(1).integers(-16, 17, (HEIGHT, WIDTH, 1))
    wave = 60 * numpy.sin(x / 17 + c) + 40 * numpy.sin(y / 11 - x / 29)
    stream = io.BytesIO()
    Image.fromarray(numpy.clip(128 + wave + noise, 0, 255).round().astype("uint8")).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def rate(read, seconds):
    for _ in range(10):
        read()
    count, begin = 0, time.process_time()  # of the processor: other programs do not count
    while time.process_time() - begin < seconds:
        read()
        count += 1
    return count / (time.process_time() - begin)


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3
    torch.set_num_threads(1)
    content = jpeg()
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    finish = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    evaluation = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(SIZE), *finish])
    training = transforms.Compose([transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), *finish])
    ends = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    tensor_evaluation = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(SIZE), *ends])
    tensor_training = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip(), *ends])

    def pillow():
        return Image.open(io.BytesIO(content)).convert("RGB")

    print(f"{len(content)} bytes, libjpeg-turbo in Pillow: {features.check_feature('libjpeg_turbo')}, one thread, images/s")
    for name, read in (("Pillow: decode", lambda: pillow()),
                       ("Pillow: evaluation", lambda: evaluation(pillow())),
                       ("Pillow: training", lambda: training(pillow())),
                       ("torchvision.io: decode", lambda: torchvision_io.decode_jpeg(raw)),
                       ("torchvision.io: evaluation", lambda: tensor_evaluation(torchvision_io.decode_jpeg(raw))),
                       ("torchvision.io: training", lambda: tensor_training(torchvision_io.decode_jpeg(raw)))):
        print(f"  {name:28} {rate(read, seconds):8.0f}")


main()
