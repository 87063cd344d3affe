//! One virtual machine: engines, boot, vCPU threads and device wiring
