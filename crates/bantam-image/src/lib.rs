//! OCI images: references, registries, content store and layers to EROFS
