//! References and the like, and registries' `WWW-Authenticate` headers.

use bantam_image::{Digest, ImageSource, Platform, Reference};

pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(reference) = Reference::parse(text) {
        let printed = reference.to_string();
        let again = Reference::parse(&printed).expect("what it prints parses");
        assert_eq!(again, reference, "{text:?} does not survive printing");
        for part in reference.repository().split('/') {
            assert!(part != ".." && !part.is_empty(), "{text:?}");
        }
    }
    if let Ok(digest) = Digest::parse(text) {
        assert_eq!(digest.to_string(), text);
    }
    if let Ok(platform) = Platform::parse(text) {
        let printed = platform.to_string();
        let again = Platform::parse(&printed).expect("what it prints parses");
        assert_eq!(again, platform, "{text:?} does not survive printing");
    }
    let _ = ImageSource::parse(text);
    for challenge in crate::auth::challenges(text) {
        assert!(!challenge.scheme.is_empty(), "{text:?}");
        assert!(!challenge.scheme.contains([' ', ',', '"']), "{text:?}");
        let _ = (challenge.get("realm"), challenge.get("scope"));
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    let hex = "0123456789abcdef".repeat(4);
    [
        "alpine",
        "localhost:5000/a/b:tag",
        "[::1]:5000/a_b__c---d.e:T_.-",
        &format!("index.docker.io/library/x:1@sha256:{hex}"),
        &format!("sha512:{hex}{hex}"),
        "linux/arm64/v8",
        "oci:/a/b:c",
        "docker-archive:x.tar",
        r#"Bearer realm="https://a/b?c=d,e",service="s",scope="repository:a:pull,push", Basic realm="x\"y""#,
        "Negotiate, Basic realm = x, Digest a=b ,, c=\"",
        "Bearer dG9rZW4=",
    ]
    .iter()
    .map(|seed| seed.as_bytes().to_vec())
    .collect()
}
