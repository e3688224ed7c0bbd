"""Starting, watching and stopping ranks: `paraplan launch`, torchrun's equal on top of torch's elastic agent."""
