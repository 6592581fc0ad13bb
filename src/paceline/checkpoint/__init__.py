"""Checkpoints: what a run is made of on disk, from any number of workers to any other.

[Note: checkpoints] A checkpoint is a folder. Each worker writes one safetensors file with what it owns; what all hold
alike is shared out by bytes, so every byte is written once and no file is much larger than another. A tensor lies in
these files in stretches of its elements, flat, and `manifest.json` says which stretch is where, with the size and
sha256 of every file. All of it is written into a folder with another name, flushed to the disk, and renamed at the
end: a folder with a manifest is a whole checkpoint, and what a killed save leaves behind is none.

A worker that loads asks the manifest for the stretches it needs, whoever wrote them. So the number of workers and the
layout may be others than they were. There is no code in any of it: JSON and numbers.
"""
