//! Exit codes and messages, the way into the background, what is handed over, and the ways to end.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use forestvpn_quantum::io::{Tun, fd};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::place::{FV, Place, Running, text, within};

fn fv(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(FV)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("fv runs");
    // It need not read what it does not want.
    let _ = child.stdin.take().expect("piped").write_all(input.as_bytes());
    child.wait_with_output().expect("fv ends")
}

#[test]
fn keys_made_and_turned_into_public_keys_are_those_of_wg() {
    let key = fv(&["genkey"], "");
    assert!(key.status.success());
    let public = fv(&["pubkey"], &text(&key.stdout));
    assert!(public.status.success());
    assert_eq!((key.stdout.len(), public.stdout.len(), fv(&["genpsk"], "").stdout.len()), (45, 45, 45));
    if let Ok(mut wg) = Command::new("wg").arg("pubkey").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
    {
        wg.stdin.take().expect("piped").write_all(&key.stdout).expect("wg reads");
        assert_eq!(wg.wait_with_output().expect("wg ends").stdout, public.stdout);
    }
}

#[test]
fn bad_input_ends_with_a_sentence_on_standard_error_and_a_code() {
    for (args, input, part) in [
        (&["pubkey"][..], "rubbish\n", "this is no private key"),
        (&["sixteen-bytes-xx"], "", "it has 16 bytes, at most 15 are possible"),
        (&["a/b"], "", "it has a / in it"),
        (&["--threads", "0", "wg0"], "", "a number of threads is 1 or more"),
        (&["show", "nosuchtunnel"], "", "no tunnel of this name runs in user space here"),
    ] {
        let output = fv(args, input);
        assert!(!output.status.success() && output.stdout.is_empty(), "{args:?}");
        assert!(text(&output.stderr).contains(part), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    let help = fv(&["--help"], "");
    assert!(help.status.success() && text(&help.stdout).contains("Examples:"));
    assert!(text(&fv(&["--version"], "").stdout).starts_with("fv 0."));
}

#[test]
fn the_parent_ends_only_when_wg_can_talk_to_the_tunnel() {
    let Some(place) = Place::new("a", &[]) else { return };
    for _ in 0..5 {
        let output = place.command(FV).arg(&place.name).output().expect("fv runs");
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
        assert!(place.answers() && place.has_interface());
        assert!(place.run(&["ip", "link", "show", &place.name]).contains("mtu 1420"));
        place.run(&["ip", "link", "delete", &place.name]);
        assert!(within(5, || place.is_empty()), "something is left");
    }
}

#[test]
fn a_signal_in_the_background_ends_it_and_leaves_nothing() {
    let Some(place) = Place::new("b", &[]) else { return };
    place.run(&[FV, &place.name]);
    let [pid] = place.pids()[..] else { panic!("one process: {:?}", place.pids()) };
    kill(Pid::from_raw(pid), Signal::SIGTERM).expect("it runs");
    assert!(within(5, || place.is_empty()), "something is left");
}

#[test]
fn each_way_to_end_it_in_the_foreground_is_a_success_that_leaves_nothing() {
    let Some(place) = Place::new("c", &[]) else { return };
    type Way<'a> = &'a dyn Fn(&Running);
    let ways: [(&str, Way<'_>); 5] = [
        ("SIGTERM", &|running| running.signal(Signal::SIGTERM)),
        ("SIGINT", &|running| running.signal(Signal::SIGINT)),
        ("SIGHUP", &|running| running.signal(Signal::SIGHUP)),
        ("interface deleted", &|_| drop(place.run(&["ip", "link", "delete", &place.name]))),
        ("socket removed", &|_| fs::remove_file(place.socket()).expect("it is there")),
    ];
    for (name, way) in ways {
        if name == "SIGHUP" && hangup_is_ignored() {
            // Under nohup fv is meant to outlive the terminal, and inherits that from us.
            continue;
        }
        let running = place.foreground(&[]);
        place.run(&["ip", "link", "set", &place.name, "up"]);
        way(&running);
        assert_eq!(running.end(), (Some(0), String::new()), "{name}");
        assert!(place.is_empty(), "{name}: something is left");
    }
}

fn hangup_is_ignored() -> bool {
    let status = fs::read_to_string("/proc/self/status").expect("/proc");
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).expect("a mask of ignored signals");
    u64::from_str_radix(mask.trim(), 16).expect("a number") & 1 != 0
}

#[test]
fn f147_after_a_kill_the_next_start_works_and_a_second_one_beside_it_is_refused() {
    let Some(place) = Place::new("d", &[]) else { return };
    let running = place.foreground(&[]);
    running.signal(Signal::SIGKILL);
    assert_eq!(running.end().0, None);
    assert!(place.socket().exists(), "the killed process left its socket");
    let running = place.foreground(&[]);

    let second = place.command(FV).arg(&place.name).output().expect("fv runs");
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("in use by another program"), "{}", text(&second.stderr));

    // The same name in another namespace: no clash of interfaces, but one of sockets.
    let elsewhere = Place::new("e", &[]).expect("as before");
    let third = elsewhere.command(FV).arg(&place.name).output().expect("fv runs");
    assert_eq!(third.status.code(), Some(1));
    assert!(text(&third.stderr).contains("another process serves"), "{}", text(&third.stderr));
    assert!(place.answers());
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end().0, Some(0));
}

#[test]
fn f146_a_process_that_was_stopped_and_continued_goes_on() {
    let Some(place) = Place::new("f", &[]) else { return };
    let running = place.foreground(&[]);
    for _ in 0..3 {
        running.signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(50));
        running.signal(Signal::SIGCONT);
        assert!(place.answers());
    }
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), (Some(0), String::new()));
}

#[test]
fn f148_an_environment_without_anything_is_enough() {
    let Some(place) = Place::new("n", &["env"]) else { return };
    place.run(&["env", "-i", FV, &place.name]);
    assert!(place.answers());
}

#[test]
fn f149_without_the_device_or_the_right_to_make_interfaces_it_says_what_is_missing() {
    let Some(place) = Place::new("g", &["setpriv", "unshare"]) else { return };
    let without_right = ["--bounding-set=-net_admin", "--inh-caps=-net_admin", FV, &place.name];
    let hidden =
        format!("mount -t tmpfs none /dev/net && exec setpriv --bounding-set=-mknod {FV} {}", place.name);
    for (program, args, part) in [
        ("setpriv", &without_right[..], "CAP_NET_ADMIN is missing"),
        ("unshare", &["--mount", "sh", "-c", &hidden], "/dev/net/tun does not exist"),
    ] {
        let output = place.command(program).args(args).output().expect(program);
        assert_eq!(output.status.code(), Some(1), "{part}");
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
        assert!(place.is_empty(), "{part}: something is left");
    }
}

#[test]
fn the_environment_of_wireguard_go_is_understood() {
    let Some(place) = Place::new("i", &[]) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("notify");
    let systemd = UnixDatagram::bind(&path).expect("bound");
    let mut command = place.command(FV);
    command.arg(&place.name).stderr(Stdio::piped());
    command.env("WG_PROCESS_FOREGROUND", "1").env("LOG_LEVEL", "debug").env("WG_THREADS", "2");
    command.env("NOTIFY_SOCKET", &path);
    let running = Running(command.spawn().expect("fv runs"));
    let mut buffer = [0; 64];
    let length = systemd.recv(&mut buffer).expect("told");
    assert_eq!(text(&buffer[..length]), format!("READY=1\nMAINPID={}", running.0.id()));
    assert!(place.answers(), "ready means ready");
    let tasks = fs::read_dir(format!("/proc/{}/task", running.0.id())).expect("tasks");
    let names =
        tasks.map(|task| fs::read_to_string(task.expect("a task").path().join("comm")).unwrap_or_default());
    assert_eq!(names.filter(|name| name.starts_with("carrier")).count(), 1, "WG_THREADS=2 is one more");
    running.signal(Signal::SIGTERM);
    let (code, said) = running.end();
    assert_eq!(code, Some(0));
    assert!(said.contains(&format!("fv {}: info: signal 15; ending", place.name)), "{said}");
}

#[test]
fn a_log_that_was_asked_for_goes_on_in_the_background() {
    let Some(place) = Place::new("j", &[]) else { return };
    let log = tempfile::NamedTempFile::new().expect("a file");
    let mut command = place.command(FV);
    command.arg(&place.name).env("LOG_LEVEL", "debug").stderr(log.reopen().expect("a file"));
    assert!(command.status().expect("fv runs").success());
    place.run(&["ip", "link", "delete", &place.name]);
    let said = || fs::read_to_string(log.path()).expect("text");
    assert!(within(5, || said().contains("the interface was deleted; ending")), "{}", said());
}

fn hand_over(command: &mut Command, variable: &str, fd: &OwnedFd) {
    fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).expect("open");
    command.env(variable, fd.as_raw_fd().to_string());
}

#[test]
fn a_listening_socket_that_is_handed_over_is_served() {
    let Some(place) = Place::new("k", &[]) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mine.sock");
    let listener: OwnedFd = UnixListener::bind(&path).expect("bound").into();
    let mut command = place.command(FV);
    command.args(["-f", &place.name]).stderr(Stdio::piped());
    hand_over(&mut command, "WG_UAPI_FD", &listener);
    let running = Running(command.spawn().expect("fv runs"));
    drop(listener);
    let mut stream = UnixStream::connect(&path).expect("it listens");
    stream.write_all(b"get=1\n\n").expect("sent");
    stream.shutdown(std::net::Shutdown::Write).expect("shut");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.ends_with("errno=0\n\n"), "{answer}");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.end(), (Some(0), String::new()));
    assert!(!path.exists());
}

#[test]
fn a_tun_device_that_is_handed_over_keeps_its_name_and_mtu_also_on_the_way_into_the_background() {
    let Some(place) = Place::new("x", &[]) else { return };
    let other = place.neighbour("y");
    let tun = place.inside(|| Tun::open(&place.name).expect("root may"));
    place.run(&["ip", "link", "set", &place.name, "mtu", "1500"]);
    let mut command = place.command(FV);
    // The name on the command line gives way to the one that the interface has.
    command.arg(&other.name).env("WG_TUN_FD", fd::pass_on(tun.as_fd()).expect("open").to_string());
    let output = command.output().expect("fv runs");
    drop(tun);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    assert!(place.answers() && !other.socket().exists());
    assert!(place.run(&["ip", "link", "show", &place.name]).contains("mtu 1500"));
    let [pid] = other.pids()[..] else { panic!("one process: {:?}", other.pids()) };
    kill(Pid::from_raw(pid), Signal::SIGTERM).expect("it runs");
    assert!(within(5, || other.pids().is_empty() && place.is_empty()), "something is left");
}

#[test]
fn descriptors_that_are_not_what_they_should_be_are_refused() {
    let Some(place) = Place::new("l", &[]) else { return };
    let file: OwnedFd = fs::File::open("/dev/null").expect("there").into();
    for (variable, value, part) in [
        ("WG_TUN_FD", "x", "WG_TUN_FD=x: a descriptor is a number"),
        ("WG_TUN_FD", "999", "WG_TUN_FD=999: "),
        ("WG_TUN_FD", "", "WG_TUN_FD: "),
        ("WG_UAPI_FD", "", "WG_UAPI_FD: "),
    ] {
        let mut command = place.command(FV);
        command.args(["-f", &place.name]);
        hand_over(&mut command, variable, &file);
        if !value.is_empty() {
            command.env(variable, value);
        }
        let output = command.output().expect("fv runs");
        assert_eq!(output.status.code(), Some(1), "{variable}={value}");
        assert!(text(&output.stderr).contains(part), "{variable}={value}: {}", text(&output.stderr));
        assert!(place.is_empty(), "{variable}={value}");
    }
}

#[test]
fn wg_quick_brings_a_tunnel_up_and_down() {
    let Some(place) = Place::new("m", &["wg-quick"]) else { return };
    assert!(
        !Path::new("/sys/module/wireguard").exists(),
        "wg-quick takes the kernel's WireGuard on this machine"
    );
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join(format!("{}.conf", place.name));
    let private = text(&fv(&["genkey"], "").stdout);
    let peer = text(&fv(&["pubkey"], &text(&fv(&["genkey"], "").stdout)).stdout);
    let config = format!(
        "[Interface]\nPrivateKey = {private}Address = 10.77.0.1/24, fd77::1/64\nListenPort = 5151\nMTU = 1400\n\
         [Peer]\nPublicKey = {peer}AllowedIPs = 10.77.0.2/32, 10.78.0.0/16, fd77::2/128\nEndpoint = 192.0.2.1:5\n"
    );
    fs::write(&file, config).expect("written");
    let file = file.to_str().expect("text");
    let wg_quick = |verb| {
        let mut command = place.command("wg-quick");
        command.args([verb, file]).env("WG_QUICK_USERSPACE_IMPLEMENTATION", FV);
        let output = command.output().expect("wg-quick");
        assert!(output.status.success(), "wg-quick {verb}: {}", text(&output.stderr));
    };
    for _ in 0..2 {
        wg_quick("up");
        let shown = place.run(&["wg", "show", &place.name]);
        assert!(shown.contains("listening port: 5151") && shown.contains("10.78.0.0/16"), "{shown}");
        let link = place.run(&["ip", "address", "show", "dev", &place.name]);
        assert!(link.contains("mtu 1400") && link.contains("10.77.0.1/24"), "{link}");
        assert!(place.run(&["ip", "route"]).contains("10.78.0.0/16"));
        wg_quick("down");
        assert!(within(5, || place.is_empty()), "something is left");
    }
}
