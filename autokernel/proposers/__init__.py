"""Who suggests the next kernel: the built-in playbook, or a language model.  Both are `base.Proposer`."""
