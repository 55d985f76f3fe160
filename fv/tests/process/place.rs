//! A network namespace with one interface name of its own, and `fv` running in it. Used by the tests of `fv` as
//! a process.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

pub(crate) const FV: &str = env!("CARGO_BIN_EXE_fv");

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A network namespace, and in it one interface name that nothing else on this machine uses.
pub(crate) struct Place {
    netns: String,
    /// It makes the namespace and takes it away.
    owner: bool,
    pub(crate) name: String,
}

impl Place {
    /// Says why there is none here, or fails when skipping is forbidden.
    pub(crate) fn new(label: &str, tools: &[&str]) -> Option<Self> {
        let there = |tool: &&&str| Command::new(tool).arg("--version").output().is_ok();
        let missing = ["ip", "wg"].iter().chain(tools).find(|tool| !there(tool));
        let reason = match missing {
            _ if !nix::unistd::geteuid().is_root() => Some("not root".to_owned()),
            Some(tool) => Some(format!("no {tool}")),
            None => None,
        };
        if let Some(reason) = reason {
            assert!(std::env::var_os("FV_NO_SKIP").is_none(), "cannot run: {reason}");
            println!("skipped: {reason}");
            return None;
        }
        let name = format!("fvx{label}{}", std::process::id());
        let place = Self { netns: format!("fvxns-{label}{}", std::process::id()), owner: true, name };
        place.outside(&["ip", "netns", "add", &place.netns]);
        Some(place)
    }

    /// Another interface name in the same namespace; to be dropped first.
    pub(crate) fn neighbour(&self, label: &str) -> Self {
        let name = format!("fvx{label}{}", std::process::id());
        Self { netns: self.netns.clone(), owner: false, name }
    }

    /// A program, to be run in the namespace.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, program]);
        for variable in ["LOG_LEVEL", "WG_LOG_LEVEL", "WG_THREADS", "NOTIFY_SOCKET", "WG_PROCESS_FOREGROUND"]
        {
            command.env_remove(variable);
        }
        command.stdin(Stdio::null());
        command
    }

    /// A cable to `other`; both ends have this interface name and the address given, and are up.
    pub(crate) fn cable(&self, name: &str, here: &str, other: &Self, there: &str) {
        let (ours, theirs) = (self.netns.as_str(), other.netns.as_str());
        let words = ["ip", "link", "add", name, "netns", ours, "type", "veth", "peer", name, "netns", theirs];
        self.outside(&words);
        for (place, address) in [(self, here), (other, there)] {
            // Without addresses of its own making, which would come at a time of their choice.
            place.run(&["ip", "link", "set", name, "addrgenmode", "none", "up"]);
            place.run(&["ip", "address", "add", address, "dev", name]);
        }
    }

    fn outside(&self, words: &[&str]) {
        let output = Command::new(words[0]).args(&words[1..]).output().expect(words[0]);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
    }

    /// Runs a program in the namespace; it must succeed.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        let output = self.command(words[0]).args(&words[1..]).output().expect(words[0]);
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs `work` on a thread in the namespace; sockets it makes belong there.
    pub(crate) fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let netns = fs::File::open(Path::new("/run/netns").join(&self.netns)).expect("it is there");
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                setns(netns, CloneFlags::CLONE_NEWNET).expect("root may");
                work()
            });
            thread.join().expect("no panic")
        })
    }

    pub(crate) fn socket(&self) -> PathBuf {
        format!("/var/run/wireguard/{}.sock", self.name).into()
    }

    pub(crate) fn has_interface(&self) -> bool {
        self.command("ip").args(["link", "show", &self.name]).output().expect("ip").status.success()
    }

    /// `fv -f` with more environment, started and ready.
    pub(crate) fn foreground(&self, environment: &[(&str, &str)]) -> Running {
        let mut command = self.command(FV);
        command.args(["-f", &self.name]).stderr(Stdio::piped()).envs(environment.iter().copied());
        let running = Running(command.spawn().expect("fv runs"));
        assert!(within(10, || self.answers()), "it is not ready");
        running
    }

    pub(crate) fn answers(&self) -> bool {
        Command::new("wg").args(["show", &self.name]).output().expect("wg").status.success()
    }

    /// Process ids of all `fv` that serve this interface.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let is_ours = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = line.split(|b| *b == 0).collect();
            words.first().is_some_and(|word| word.ends_with(b"/fv")) && words.contains(&self.name.as_bytes())
        };
        let all = fs::read_dir("/proc").expect("/proc");
        all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.socket().exists() && !self.has_interface() && self.pids().is_empty()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for pid in self.pids() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        let _ = fs::remove_file(self.socket());
        if self.owner {
            let _ = Command::new("ip").args(["netns", "delete", &self.netns]).output();
        }
    }
}

/// A process in the foreground; ended when dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().cast_signed()), signal).expect("it runs");
    }

    /// Its exit code and what it said, once it ends by itself.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        assert!(within(10, || matches!(self.0.try_wait(), Ok(Some(_)))), "it does not end");
        let mut said = String::new();
        self.0.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
        (self.0.wait().expect("ended").code(), said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn within(seconds: u64, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(seconds);
    while !done() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}
