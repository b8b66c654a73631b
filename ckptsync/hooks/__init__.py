"""Hooks that run in the training, so that rotation deletes no checkpoint before it is stored.

Only the training process knows when a save is complete, and only it can act before rotation.  So a
hook pins each save with hard links at the next event of its rank, marks it as complete, and leaves
the upload to a worker.  Nothing is written in a checkpoint's directory; no hook waits for another
rank, calls a collective, or lets an exception reach the trainer.  Modules need the standard library
and what the trainer has imported anyway, except `ray_checkpoints` and `ray_callback`, which upload,
verify and compare nodes, and raise what those raise.

The core, in reading order:
  `pin_checkpoint`   links to all files of a save, published by one rename; room on the disk
  `process_group`    the rank of this process, and values that ranks exchange without waiting
  `rank_markers`     one rank's introduction, marks and pins in one output directory
  `added_files`      configuration, tokenizer and versions, beside sharded checkpoints
  `embedded_worker`  a worker that the training starts where none is installed; the wait for a store
The adapters:
  `trainer_saves`, `hf`   Hugging Face's Trainer
  `autoload`              the same for every Trainer of a Python (`ckptsync hook install`)
  `llamafactory`          the same in every process of LLaMA-Factory (`ckptsync-llamafactory`)
  `mark_saved`            one line of any script
  `ray`, `ray_callback`, `ray_checkpoints`   Ray Train
"""
