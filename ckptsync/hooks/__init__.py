"""Inside trainers: what runs in the training process itself.

Standard library and what the trainer has imported anyway: nothing here needs what the rest of ckptsync is installed with.  Nothing
waits for another rank, no collective is called, and no exception reaches the trainer.
Except `ray_upload`, `ray_validate` and `ray_doctor`, which do what the rest of ckptsync does, and raise what it raises.
"""
