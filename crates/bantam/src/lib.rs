//! Embed a microVM sandbox: boot an OCI image in its own Linux kernel and run commands in it
