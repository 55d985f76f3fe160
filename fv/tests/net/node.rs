//! A running WireGuard implementation with one interface on one host, driven through `wg`. Used by every test.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::{Host, find, sh, try_sh, unique};

/// What can stand at an end of a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    Fv,
    /// `fv` with so many threads.
    FvThreads(u8),
    WireguardGo,
    Boringtun,
    Gotatun,
}

impl Program {
    /// The name of its executable, as `ready` wants it; `fv` is always there.
    pub(crate) const fn tool(self) -> &'static str {
        match self {
            Self::Fv | Self::FvThreads(_) => "ip",
            Self::WireguardGo => "wireguard-go",
            Self::Boringtun => "boringtun-cli",
            Self::Gotatun => "gotatun",
        }
    }

    pub(crate) fn path(self) -> PathBuf {
        if matches!(self, Self::Fv | Self::FvThreads(_)) {
            return std::env::var_os("FV_TEST_BIN")
                .map_or_else(|| env!("CARGO_BIN_EXE_fv").into(), Into::into);
        }
        find(self.tool()).expect("`ready` was asked first")
    }
}

/// A key pair in base64, as `wg` writes it.
#[derive(Clone)]
pub(crate) struct Keys {
    pub(crate) private: String,
    pub(crate) public: String,
}

impl Keys {
    #[track_caller]
    pub(crate) fn generate() -> Self {
        let text = sh("k=$(wg genkey); echo $k; wg pubkey <<<$k");
        let (private, public) = text.split_once('\n').expect("two lines");
        Self { private: private.into(), public: public.into() }
    }
}

/// An implementation that runs; killed, and its interface and socket removed, when dropped.
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) program: Program,
    child: Child,
    log: PathBuf,
}

impl Node {
    /// Starts `program` on `host` with a fresh interface name and waits until `wg` can talk to it.
    #[track_caller]
    pub(crate) fn start(program: Program, host: &Host) -> Self {
        Self::start_named(program, host, &format!("t{}", unique().replace('-', "n")))
    }

    /// As `start`, with an interface name of the caller's choice.
    #[track_caller]
    pub(crate) fn start_named(program: Program, host: &Host, name: &str) -> Self {
        let mut command = host.command(program.path().to_str().expect("a plain path"));
        command.args(["-f", name]);
        if matches!(program, Program::Boringtun | Program::Gotatun) {
            // They would look for the login name of a terminal, and end where there is none.
            command.arg("--disable-drop-privileges").env("WG_THREADS", "1");
        }
        if let Program::FvThreads(count) = program {
            command.arg(format!("--threads={count}"));
        }
        if program == Program::Boringtun {
            // Its sockets connected to a peer's address do not hear the peer at a new one.
            command.arg("--disable-connected-udp");
        }
        Self::start_with(program, command, name)
    }

    /// `fv` behind a seccomp filter: what a system that lacks something would answer. `number` is the system call's on
    /// x86-64 and AArch64; `rules` are tuples of classic BPF after the call's number was loaded, as Python has them.
    #[track_caller]
    pub(crate) fn start_filtered(host: &Host, number: [u32; 2], rules: &str) -> Self {
        let name = format!("t{}", unique().replace('-', "n"));
        let mut command = host.command("python3");
        let [x86, arm] = number;
        let filter = format!(
            r#"
import ctypes, os, platform, struct, sys
number = {{"x86_64": {x86}, "aarch64": {arm}}}[platform.machine()]
code = [(0x20, 0, 0, 0), {rules}]
text = b"".join(struct.pack("HBBI", *c) for c in code)
buffer = ctypes.create_string_buffer(text)
class Program(ctypes.Structure): _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(len(code), ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"#
        );
        command.args(["-c", &filter, &Program::Fv.path().display().to_string(), "-f", &name]);
        Self::start_with(Program::Fv, command, &name)
    }

    /// As `start_named`, with a command line of the caller's choice.
    #[track_caller]
    pub(crate) fn start_with(program: Program, mut command: Command, name: &str) -> Self {
        assert!(name.len() <= 15, "interface name too long: {name}");
        let log = std::env::temp_dir().join(format!("fvt-{}.log", unique()));
        let out = File::create(&log).expect("log file");
        command.stdin(Stdio::null()).stdout(out.try_clone().expect("log file")).stderr(out);
        let child = command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let mut node = Self { name: name.into(), program, child, log };
        let ready =
            || std::fs::exists(node.socket()).is_ok_and(|yes| yes) && node.try_wg("show").status.success();
        if !within(Duration::from_secs(10), ready) {
            let state = node.child.try_wait();
            panic!("{program:?} {name} did not come up ({state:?}): {}", node.log());
        }
        node
    }

    /// Kills it without warning and starts it again under the same name.
    #[track_caller]
    pub(crate) fn kill_and_restart(&mut self, host: &Host) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let (name, program) = (self.name.clone(), self.program);
        let mut new = Self::start_named(program, host, &name);
        // The old one is dropped with a child that has ended; its socket file is the new one's.
        std::mem::swap(self, &mut new);
        new.name.clear();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        format!("/var/run/wireguard/{}.sock", self.name).into()
    }

    /// What it printed so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// `wg VERB NAME REST…`, in bash: a key is given as `<(echo KEY)`. Panics when `wg` fails.
    #[track_caller]
    pub(crate) fn wg(&self, verb_and_rest: &str) -> String {
        let (verb, rest) = verb_and_rest.split_once(' ').unwrap_or((verb_and_rest, ""));
        sh(&format!("wg {verb} {} {rest}", self.name))
    }

    /// As `wg`, whatever comes of it.
    pub(crate) fn try_wg(&self, verb_and_rest: &str) -> Output {
        let (verb, rest) = verb_and_rest.split_once(' ').unwrap_or((verb_and_rest, ""));
        try_sh(&format!("wg {verb} {} {rest}", self.name))
    }

    /// `wg show NAME FIELD` as the words after `public`, the peer's key.
    #[track_caller]
    pub(crate) fn peer(&self, public: &str, field: &str) -> String {
        let text = self.wg(&format!("show {field}"));
        let line = text.lines().find(|line| line.starts_with(public));
        let line = line.unwrap_or_else(|| panic!("no peer {public} in {field}: {text}"));
        line[public.len()..].trim().to_owned()
    }

    /// Received and sent bytes of a peer.
    #[track_caller]
    pub(crate) fn transfer(&self, public: &str) -> (u64, u64) {
        let text = self.peer(public, "transfer");
        let (rx, tx) = text.split_once('\t').expect("two numbers");
        (rx.parse().expect("a number"), tx.parse().expect("a number"))
    }

    /// Sends raw text to the UAPI socket, as one connection, and returns all that comes back within a second of quiet.
    #[track_caller]
    pub(crate) fn uapi(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
        // A server may close before it has read all of a bad request.
        let _ = stream.write_all(request.as_bytes());
        let mut reply = Vec::new();
        let mut chunk = [0; 65536];
        while !reply.ends_with(b"\n\n") {
            match stream.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(n) => reply.extend_from_slice(&chunk[..n]),
            }
        }
        String::from_utf8(reply).expect("text")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).expect("signal");
    }

    pub(crate) fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// How the process ended, if it does within `limit`.
    pub(crate) fn ended(&mut self, limit: Duration) -> Option<ExitStatus> {
        let mut status = None;
        within(limit, || {
            status = self.child.try_wait().expect("wait");
            status.is_some()
        });
        status
    }

    /// Processor time used so far, user and system.
    pub(crate) fn cpu(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("process is there");
        let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
        let ticks: u64 =
            fields[11].parse::<u64>().expect("utime") + fields[12].parse::<u64>().expect("stime");
        Duration::from_millis(ticks * 10)
    }

    /// Resident memory in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("process is there");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// How many file descriptors are open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("process is there").count()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.running() {
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
            if self.ended(Duration::from_secs(2)).is_none() {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
        if std::thread::panicking() {
            eprintln!("--- {:?} {} said:\n{}", self.program, self.name, self.log());
        }
        let _ = std::fs::remove_file(&self.log);
        if !self.name.is_empty() {
            let _ = std::fs::remove_file(self.socket());
        }
    }
}

/// Asks until `done` says yes; false when `limit` passed first.
pub(crate) fn within(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
