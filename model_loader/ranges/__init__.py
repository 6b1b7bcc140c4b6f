"""Ranges of files from wherever they are (disk, another slot, an object store), every chunk verified as it lands.

`source` is what a place must be able to do, `reader` reads spans from several of them. Nothing here knows of models: a
*file* is a name with a `ChunkList`, be it a checkpoint's file or a prepared form.
"""
