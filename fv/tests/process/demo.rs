//! `fv demo` as root, as an ordinary user, without a TUN device, and interrupted.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;

use crate::place::{FV, Running, text, within};

/// Says why a test cannot run here, or fails when skipping is forbidden.
fn skip(reason: &str) {
    assert!(std::env::var_os("FV_NO_SKIP").is_none(), "cannot run: {reason}");
    println!("skipped: {reason}");
}

fn demo(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["demo", "--megabytes", "20"]).env("TMPDIR", folder).stdin(Stdio::null());
    command
}

/// It verified everything, and left nothing in its folder.
fn check(output: &Output, folder: &Path, first: &str) -> String {
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.starts_with(first), "{said}");
    assert!(said.trim_end().ends_with("Everything verified."), "{said}");
    assert_eq!(fs::read_dir(folder).expect("a folder").count(), 0, "something is left");
    said
}

/// A folder that any user may write into and nobody else looks into.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("open to all");
    folder
}

#[test]
fn as_root_two_ends_ping_each_other_and_a_transfer_arrives_whole() {
    if !geteuid().is_root() {
        return skip("not root");
    }
    let folder = folder();
    let output = demo(Path::new(FV), folder.path()).output().expect("fv runs");
    let said = check(&output, folder.path(), "fv demo: two network namespaces, as root");
    for part in ["200/200", "Mbit/s", "s per Gbit", "p99", "matches there, matches back", "udp received"] {
        assert!(said.contains(part), "{part} not in {said}");
    }
}

#[test]
fn an_ordinary_user_gets_the_same_without_any_privilege() {
    let tun = fs::metadata("/dev/net/tun").map(|meta| meta.permissions().mode() & 0o006);
    if !tun.is_ok_and(|mode| mode == 0o006) {
        return skip("/dev/net/tun is not open to all users");
    }
    if fs::read_to_string("/proc/sys/user/max_user_namespaces").is_ok_and(|max| max.trim() == "0") {
        return skip("user namespaces are switched off");
    }
    let (folder, programs) = (folder(), folder());
    // Where it was built only root may be able to look.
    let program = programs.path().join("fv");
    fs::copy(FV, &program).expect("copied");
    let mut command = demo(&program, folder.path());
    if geteuid().is_root() {
        command.uid(64_124).gid(64_124);
    }
    let output = command.current_dir("/").output().expect("fv runs");
    check(&output, folder.path(), "fv demo: two network namespaces inside of a user namespace");
}

#[test]
fn without_a_tun_device_it_says_why_and_runs_the_library_path() {
    let folder = folder();
    let said = if geteuid().is_root() {
        let empty = tempfile::tempdir().expect("a folder");
        let hidden = || {
            unshare(CloneFlags::CLONE_NEWNS).expect("root may");
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private");
            mount(Some(empty.path()), "/dev/net", none, MsFlags::MS_BIND, none).expect("hidden");
            demo(Path::new(FV), folder.path()).output().expect("fv runs")
        };
        let output = thread::scope(|scope| scope.spawn(hidden).join()).expect("no panic");
        check(
            &output,
            folder.path(),
            "no TUN, library path only: there is no /dev/net/tun; load the kernel's tun module",
        )
    } else {
        let output = demo(Path::new(FV), folder.path()).arg("--no-tun").output().expect("fv runs");
        check(&output, folder.path(), "no TUN, library path only: asked for with --no-tun")
    };
    assert!(
        said.contains("SHA-256 matches") && said.contains("1000/1000") && !said.contains("TCP through"),
        "{said}"
    );
}

/// Processes that have `word` somewhere in their command line.
fn processes(word: &str) -> usize {
    let has = |pid: &str| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        pid.bytes().all(|b| b.is_ascii_digit()) && text(&line).contains(word)
    };
    let all = fs::read_dir("/proc").expect("/proc");
    all.filter(|entry| entry.as_ref().is_ok_and(|entry| entry.file_name().to_str().is_some_and(has))).count()
}

#[test]
fn interrupted_or_killed_it_leaves_no_process_behind() {
    if !geteuid().is_root() {
        return skip("not root");
    }
    for signal in [Signal::SIGINT, Signal::SIGKILL] {
        let folder = folder();
        let word = folder.path().display().to_string();
        let mut command = Command::new(FV);
        command.args(["demo", "--megabytes", "10000"]).env("TMPDIR", folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let running = Running(command.spawn().expect("fv runs"));
        assert!(within(10, || processes(&word) == 2), "no ends");
        thread::sleep(Duration::from_secs(1));
        running.signal(signal);
        let (code, said) = running.end();
        assert!(within(5, || processes(&word) == 0), "an end is left");
        if signal == Signal::SIGINT {
            assert_eq!(code, Some(1));
            assert!(said.contains("interrupted"), "{said}");
            assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
        }
    }
}
