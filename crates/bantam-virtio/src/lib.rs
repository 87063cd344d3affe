//! Virtio devices and their transports (mmio, vhost-user)
