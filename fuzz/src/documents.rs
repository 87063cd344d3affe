//! Manifests, indexes and configurations.

use bantam_image::fuzzing;

pub fn run(data: &[u8]) {
    let [announced, document @ ..] = data else {
        return;
    };
    let types = fuzzing::MEDIA_TYPES;
    fuzzing::document(document, types[usize::from(*announced) % types.len()]);
    fuzzing::configuration(document);
}

pub fn seeds() -> Vec<Vec<u8>> {
    let id = format!("sha256:{}", "0123456789abcdef".repeat(4));
    let descriptor = serde_json::json!({
        "mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": id, "size": 7,
        "platform": {"os": "linux", "architecture": "amd64", "variant": "v8", "os.version": null},
        "annotations": {"org.opencontainers.image.ref.name": "x", "io.containerd.image.name": null},
        "urls": ["http://example.org"], "data": "e30=",
    });
    let documents = [
        serde_json::json!({"schemaVersion": 2, "manifests": [descriptor, descriptor]}),
        serde_json::json!({"schemaVersion": 2, "config": descriptor, "layers": [descriptor], "subject": null,
            "mediaType": "application/vnd.oci.image.manifest.v1+json", "artifactType": "x/y"}),
        serde_json::json!({"schemaVersion": 2, "manifests": [], "config": descriptor, "layers": []}),
        serde_json::json!({"schemaVersion": 1, "fsLayers": []}),
        serde_json::json!({"architecture": "amd64", "os": "linux", "variant": null, "history": [{"empty_layer": true}],
            "rootfs": {"type": "layers", "diff_ids": [id]},
            "config": {"User": "u:g", "Env": ["A=b", "", "=", "A"], "Entrypoint": ["e"], "Cmd": null,
                "WorkingDir": "a/../..", "StopSignal": "SIGRTMIN+3", "Labels": {"k": null},
                "Volumes": {"/v": {}}, "ExposedPorts": {"80/tcp": {}}}}),
    ];
    documents
        .iter()
        .enumerate()
        .map(|(i, document)| [&[i as u8][..], document.to_string().as_bytes()].concat())
        .collect()
}
