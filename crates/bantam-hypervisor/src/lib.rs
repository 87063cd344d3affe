//! Hypervisor traits and backends
