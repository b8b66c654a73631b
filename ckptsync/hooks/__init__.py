"""Hooks: what runs in the training process itself, so that rotation deletes no checkpoint before it is stored.

Nothing is written in a checkpoint's directory; no hook waits for another rank, calls a collective, or lets an exception reach the
trainer.  Modules need the standard library and what the trainer has imported anyway, except
`ray_checkpoints` and `ray_callback`, which upload, verify and compare nodes, and raise what those raise.

The core, in reading order:
  `pinning`      links to all files of a save, published at one stroke; room on the disk
  `ranks`        which rank this is, and which ranks write into the same output directory
  `saves`        one rank's introduction, marks and pins in one output directory
  `model_facts`  configuration, tokenizer and versions, beside sharded checkpoints
  `ending`       the end of the process: the final model, the wait for the store
  `embedded`     a worker that the training starts where none is installed
The adapters:
  `hf_saves`, `hf`     Hugging Face's Trainer
  `autoload`           the same for every Trainer of a Python (`ckptsync hook install`)
  `llamafactory`       ``ckptsync-llamafactory train``
  `mark_saved`         one line of any script
  `ray`, `ray_callback`, `ray_worker`, `ray_checkpoints`   Ray Train
"""
