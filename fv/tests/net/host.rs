//! A host: one network namespace, the cables to others, and commands run inside. Used by every test.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nix::sched::{CloneFlags, setns};

use crate::node::within;

/// True when the machine has what the test needs. Otherwise says what is missing, or fails if skipping is forbidden.
#[track_caller]
pub(crate) fn ready(tools: &[&str]) -> bool {
    let lacking = lacking(tools);
    if let Some(what) = &lacking {
        assert!(std::env::var_os("FV_NO_SKIP").is_none(), "cannot run: {what}");
        eprintln!("skipped: {what}");
    }
    lacking.is_none()
}

fn lacking(tools: &[&str]) -> Option<String> {
    static SWEPT: OnceLock<()> = OnceLock::new();
    if !nix::unistd::geteuid().is_root() {
        return Some("needs root (network namespaces and TUN devices); try `task test:net`".into());
    }
    for tool in ["ip", "nsenter", "wg", "ping", "bash", "timeout"].iter().chain(tools) {
        if find(tool).is_none() {
            return Some(format!("`{tool}` is not installed; `.ci/run` shows what to install"));
        }
    }
    SWEPT.get_or_init(sweep);
    None
}

/// A program by name: among the peers first, then on the PATH.
pub(crate) fn find(tool: &str) -> Option<PathBuf> {
    let peers = std::env::var("FV_PEERS").unwrap_or_else(|_| "/var/cache/fv-peers".into());
    let path = std::env::var("PATH").unwrap_or_default();
    std::iter::once(format!("{peers}/bin"))
        .chain(path.split(':').map(str::to_owned))
        .map(|dir| PathBuf::from(dir).join(tool))
        .find(|file| file.is_file())
}

/// Removes what an interrupted run left behind: namespaces whose test process is gone.
fn sweep() {
    for name in sh("ip netns list").split_whitespace() {
        let Some(pid) = name.strip_prefix("fvt-").and_then(|rest| rest.split('-').next()) else { continue };
        if !PathBuf::from(format!("/proc/{pid}")).exists() {
            try_sh(&format!("ip netns delete {name}"));
        }
    }
}

/// A short name that nothing else on this machine has: interfaces allow 15 characters, and UAPI sockets share one folder.
pub(crate) fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Runs a command line on the machine itself; panics with its words when it fails.
#[track_caller]
pub(crate) fn sh(line: &str) -> String {
    expect(line, try_sh(line))
}

/// Runs a command line on the machine itself, whatever comes of it.
pub(crate) fn try_sh(line: &str) -> Output {
    bounded(Command::new("timeout").args(["-k", "2", "120", "bash", "-c", line]))
}

fn bounded(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

#[track_caller]
fn expect(line: &str, output: Output) -> String {
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        panic!("`{line}`: {}\n{}{out}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    out.trim_end().to_owned()
}

/// A network namespace with its loopback up; deleted when dropped.
pub(crate) struct Host {
    name: String,
}

impl Host {
    /// `label` shows up in the namespace's name, for whoever looks at a hanging test.
    #[track_caller]
    pub(crate) fn new(label: &str) -> Self {
        let host = Self { name: format!("fvt-{}-{label}", unique()) };
        sh(&format!("ip netns add {}", host.name));
        host.ip("link set lo up");
        host.run("sysctl -qw net.ipv6.conf.all.accept_dad=0 net.ipv6.conf.default.accept_dad=0");
        host
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// `ip` on this host.
    #[track_caller]
    pub(crate) fn ip(&self, args: &str) -> String {
        sh(&format!("ip -n {} {args}", self.name))
    }

    /// A command line on this host; panics with its words when it fails.
    #[track_caller]
    pub(crate) fn run(&self, line: &str) -> String {
        expect(line, self.try_run(line))
    }

    /// A command line on this host, whatever comes of it.
    pub(crate) fn try_run(&self, line: &str) -> Output {
        bounded(self.command("timeout").args(["-k", "2", "180", "bash", "-c", line]))
    }

    /// A program to be started on this host. The child is the program itself: its id may be signalled.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.name)).arg(program);
        command
    }

    /// Runs `work` on a thread that lives on this host: sockets it makes belong there.
    pub(crate) fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let there = File::open(format!("/run/netns/{}", self.name)).expect("namespace is there");
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                setns(there, CloneFlags::CLONE_NEWNET).expect("enter namespace");
                work()
            });
            match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// A cable to `other`; both ends get the name `cable`, the addresses given (may be empty) and are up.
    #[track_caller]
    pub(crate) fn cable(&self, cable: &str, here: &[&str], other: &Self, there: &[&str]) {
        sh(&format!(
            "ip link add {cable} netns {} type veth peer name {cable} netns {}",
            self.name, other.name
        ));
        for (host, addresses) in [(self, here), (other, there)] {
            for address in addresses {
                host.address(cable, address);
            }
            host.ip(&format!("link set {cable} up"));
        }
        // A fresh cable may lose its first neighbour solicitation, which costs a second: not during the test.
        let reached = |to: &str| within(Duration::from_secs(5), || self.pings(to, 1) == 1);
        for address in there.iter().filter(|address| address.contains(':')) {
            let bare = address.split('/').next().expect("an address");
            assert!(reached(bare), "{bare} cannot be reached over {cable}");
        }
    }

    /// Gives an interface an address, usable at once (no duplicate address detection).
    #[track_caller]
    pub(crate) fn address(&self, interface: &str, address: &str) {
        let nodad = if address.contains(':') { "nodad" } else { "" };
        self.ip(&format!("address add {address} dev {interface} {nodad}"));
    }

    /// How many of `count` pings are answered, each within a second.
    #[track_caller]
    pub(crate) fn pings(&self, to: &str, count: u32) -> u32 {
        let output = self.try_run(&format!("ping -n -q -c {count} -i 0.1 -W 1 {to}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split(", ")
            .find_map(|part| part.strip_suffix(" received"))
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| panic!("ping {to}: {text}{}", String::from_utf8_lossy(&output.stderr)))
    }

    /// All of `count` pings must be answered, each within a second, once the first one was. A program learns that its
    /// link is up a moment after `ip link set up`; an initiation that comes before it has its socket is sent again after
    /// five seconds.
    #[track_caller]
    pub(crate) fn ping(&self, to: &str, count: u32) {
        let begun = within(Duration::from_secs(12), || self.pings(to, 1) == 1);
        assert!(begun, "no ping from {} to {to} was answered", self.name);
        let answered = self.pings(to, count);
        assert_eq!(answered, count, "{answered} of {count} pings from {} to {to} were answered", self.name);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        try_sh(&format!("ip netns delete {}", self.name));
    }
}
