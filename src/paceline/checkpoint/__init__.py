"""Checkpoints: what a run is made of on disk, from any number of workers to any other.

[Note: checkpoints] A checkpoint is a folder. Each worker writes two safetensors files with what it owns, one for the
model and one for all else. What all workers hold alike is divided by bytes, so every byte is written once and no file
is much larger than another. A tensor lies in these files in stretches of its elements, flat, and `manifest.json` says
which stretch is where, with the size and sha256 of every file and of itself. All of it is written into a folder with
another name, flushed to the disk, and renamed at the end: what is called a checkpoint is whole, and what a killed save
leaves behind is none ([Note: drafts]).

A worker that loads asks the manifest for the stretches it needs, which any worker may have written. So the number of
workers and the layout may be others than they were. A checkpoint holds no code, only JSON and numbers.
"""
