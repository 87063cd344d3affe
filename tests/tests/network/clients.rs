//! What people run: curl, pip, git, iperf3, against the same programs' servers.

use bantam::NetworkConfig;
use bantam_e2e::{Asked, Reply, Server, World, eventually, tests_with_world};

use super::{LIMIT, name_server, run, start, succeed};

/// An authority, a server's key, a package index, a repository, a large file: in `/tmp/www`.
const MAKE: &str = r#"
set -e
mkdir -p /tmp/www/simple/hello /tmp/ca /tmp/git
cd /tmp/ca
openssl req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 30 -subj '/CN=a test'
openssl req -newkey rsa:2048 -nodes -keyout tls.key -out tls.csr -subj '/CN=tls.example'
printf 'subjectAltName=DNS:tls.example,IP:2620:fe::9\n' >ext
openssl x509 -req -in tls.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile ext -out tls.pem
cat tls.key tls.pem >server.pem
cd /tmp/www
head -c 5000000 /dev/urandom >large
sha256sum large >large.sha256
python3 - <<'END'
import zipfile
# Not dated now: a host without a clock of its own is in 1970, of which this format knows nothing.
entry = zipfile.ZipInfo
with zipfile.ZipFile('/tmp/www/simple/hello/hello-1.0-py3-none-any.whl', 'w') as z:
    z.writestr(entry('hello.py'), 'print("hello from the index")\n')
    info = 'hello-1.0.dist-info/'
    z.writestr(entry(info + 'METADATA'), 'Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n')
    z.writestr(entry(info + 'WHEEL'), 'Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    z.writestr(entry(info + 'RECORD'), 'hello.py,,\n')
END
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q -b main /tmp/git/work
cd /tmp/git/work
for i in 1 2 3; do cp /tmp/www/large file$i; echo $i >>file$i; git add file$i; git commit -q -m "commit $i"; done
git clone -q --bare . /tmp/www/repo.git
cd /tmp/www/repo.git
git update-server-info
"#;

const HTTPS: &str = "
import http.server, os, socket, ssl
os.chdir('/tmp/www')
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
server = Server(('::', 443), http.server.SimpleHTTPRequestHandler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain('/tmp/ca/server.pem')
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
";

fn zone(asked: &Asked) -> Reply {
    match asked.name.as_str() {
        "www.example" | "tls.example" => Reply::addresses(asked, &["9.9.9.9", "2620:fe::9"]),
        "six.example" => Reply::addresses(asked, &["2620:fe::9"]),
        _ => Reply::nxdomain(),
    }
}

/// Servers of everything, ready.
fn serve(world: &World) -> Vec<Server> {
    let made = world.command(["bash", "-c", MAKE]).output().unwrap();
    assert!(
        made.status.success(),
        "{}",
        String::from_utf8_lossy(&made.stderr)
    );
    let servers = vec![
        world.serve(&[
            "python3",
            "-m",
            "http.server",
            "80",
            "--bind",
            "::",
            "--directory",
            "/tmp/www",
        ]),
        world.serve(&["python3", "-c", HTTPS]),
        world.serve(&[
            "git",
            "daemon",
            "--export-all",
            "--base-path=/tmp/www",
            "/tmp/www",
        ]),
        // Each at its address, from which it has to answer datagrams.
        world.serve(&["iperf3", "-s", "-B", World::PUBLIC]),
        world.serve(&["iperf3", "-s", "-B", World::PUBLIC_V6]),
    ];
    for port in [80, 443, 9418, 5201] {
        eventually(LIMIT, "a server", || {
            let connected = std::net::TcpStream::connect((World::PUBLIC, port));
            connected
                .map(drop)
                .map_err(|error| format!("{port}: {error}"))
        });
    }
    servers
}

tests_with_world! {
    fn curl_pip_git_and_iperf3_work_as_anywhere(world) {
        let _names = name_server(world, World::PUBLIC, zone);
        let _servers = serve(world);
        let network = NetworkConfig::public().dns_server(World::PUBLIC).unwrap();
        let machine = start(world, network);

        let check = "cd /tmp && curl -sSf -o large -o large.sha256 http://www.example/large http://www.example/large.sha256 && sha256sum -c large.sha256";
        assert_eq!(succeed(&machine, check), "large: OK\n");
        succeed(&machine, "curl -sSf -6 http://six.example/large.sha256 && curl -sSf -4 'http://9.9.9.9/' && curl -sSf 'http://[2620:fe::9]/'");
        assert_eq!(run(&machine, "curl -sS http://nothing.example/").0, 6, "no such name");

        // TLS: only with the authority that signed.
        let ca = std::fs::read(world.root().join("tmp/ca/ca.pem")).unwrap();
        machine.write_file("/usr/local/share/ca-certificates/test.crt", &ca).unwrap();
        let (code, text) = run(&machine, "curl -sS https://tls.example/large.sha256");
        assert_eq!(code, 60, "{text}");
        let authority = "/usr/local/share/ca-certificates/test.crt";
        let script = format!("cd /tmp && curl -sSf --cacert {authority} -o l https://tls.example/large && cmp l large");
        succeed(&machine, &script);
        let script = format!("openssl s_client -connect '[2620:fe::9]:443' -CAfile {authority} -verify_return_error -brief </dev/null 2>&1");
        let text = succeed(&machine, &script);
        assert!(text.contains("Verification: OK"), "{text}");

        for url in ["http://www.example/repo.git", "git://www.example/repo.git"] {
            let script = format!("rm -rf /tmp/r && git clone -q {url} /tmp/r && cd /tmp/r && git fsck --no-progress && git log --oneline | wc -l && wc -c <file3");
            let text = succeed(&machine, &script);
            assert!(text.ends_with("3\n5000002\n"), "{url}: {text}");
        }

        // Bytes a second, as iperf3's JSON has it.
        let sum = "import json, sys; d = json.load(sys.stdin); assert 'error' not in d, d['error']; e = d['end']; print(int(min(e[s]['bytes'] for s in sys.argv[1:])))";
        for (args, sums) in [
            ("", "sum_sent sum_received"),
            ("-R", "sum_sent sum_received"),
            ("-6 -P 4", "sum_sent sum_received"),
            ("-u -b 5M", "sum"),
            ("-u -b 5M -R", "sum"),
        ] {
            let server = if args.contains("-6") { "2620:fe::9" } else { "www.example" };
            let script = format!("set -o pipefail; iperf3 -J -t 2 {args} -c {server} | python3 -c \"{sum}\" {sums}");
            let bytes: u64 = succeed(&machine, &script).trim().parse().unwrap();
            assert!(bytes > 200_000, "{args}: {bytes}");
        }
    }

    fn a_machine_that_may_reach_the_index_alone_installs_from_it(world) {
        let _names = name_server(world, World::PUBLIC, zone);
        let _servers = serve(world);
        let install = "pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action ignore \
            --retries 0 --target /tmp/p --index-url http://INDEX/simple/ --trusted-host INDEX hello && PYTHONPATH=/tmp/p python3 -c 'import hello'";
        let home = &world.home;
        let args = |index: &str| {
            let mut args = vec!["run".into()];
            args.extend(home.machine_args());
            args.extend(["--dns", World::PUBLIC, "--allow-host", "www.example:80", "--", "bash", "-c"].map(Into::into));
            args.push(install.replace("INDEX", index).into());
            args
        };
        assert_eq!(home.ok(args("www.example")), "hello from the index\n");
        let elsewhere = home.bantam(args("six.example"));
        assert_eq!(elsewhere.code, 1, "{}", elsewhere.stderr);
    }
}
