"""Starting, watching and stopping ranks: `paraplan launch`, in place of torchrun, on torch's elastic agent."""
