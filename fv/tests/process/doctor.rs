//! `fv doctor` on this machine, and commands that are mistyped.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::place::{FV, Place, text};

fn fv(args: &[&str]) -> Output {
    let mut command = Command::new(FV);
    command.args(args).stdin(Stdio::null());
    command.env_remove("FV_NO_OFFLOAD").env_remove("WG_QUICK_USERSPACE_IMPLEMENTATION");
    command.output().expect("fv runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)))
}

fn find<'a>(list: &'a Value, what: &str) -> &'a Value {
    let found = list.as_array().expect("a list").iter().find(|finding| finding["what"] == what);
    found.unwrap_or_else(|| panic!("no {what}: {list}"))
}

#[test]
fn the_exit_code_says_whether_a_tunnel_can_run_here_and_the_text_says_why_not() {
    let output = fv(&["doctor"]);
    let said = text(&output.stdout);
    if output.status.success() {
        assert!(said.contains("\nA tunnel can run here.\n") && !said.contains("FAIL"), "{said}");
    } else {
        println!("no tunnel can run on this machine:\n{said}");
        assert_eq!(output.status.code(), Some(1));
        assert!(said.contains("FAIL") && said.contains("\nNo tunnel can run here: "), "{said}");
    }
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    for what in ["kernel", "threads", "cipher", "switches", "TUN device"] {
        assert!(said.contains(what), "{what}: {said}");
    }
    let list = json(&fv(&["doctor", "--json"]));
    assert_eq!(list["ok"], output.status.success());
}

#[test]
fn nothing_is_left_behind_and_everything_is_found_where_everything_is_allowed() {
    let Some(place) = Place::new("dr", &[]) else { return };
    let before = place.run(&["ip", "-o", "link"]);
    let output = place.command(FV).args(["doctor", "--json"]).output().expect("fv runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let list = json(&output);
    for what in ["TUN device", "interface", "TCP super-packets", "joined writes", "IPv4", "receive buffer"] {
        assert_eq!(find(&list["findings"], what)["state"], "ok", "{what}");
    }
    assert_eq!(place.run(&["ip", "-o", "link"]), before);
}

#[test]
fn without_the_right_to_make_interfaces_it_fails_and_says_what_is_missing() {
    let Some(place) = Place::new("dc", &["setpriv"]) else { return };
    let mut command = place.command("setpriv");
    command.args(["--bounding-set=-net_admin", "--inh-caps=-net_admin", FV, "doctor"]);
    let output = command.output().expect("setpriv runs");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let last = said.lines().rfind(|line| line.starts_with("No tunnel")).expect("a verdict");
    assert!(last.contains("CAP_NET_ADMIN") && last.contains("run as root"), "{said}");
    assert_eq!(said.matches("FAIL").count(), 1, "{said}");

    let mut command = place.command("unshare");
    let hide = format!("mount -t tmpfs tmpfs /dev/net && exec {FV} doctor");
    command.args(["--mount", "setpriv", "--bounding-set=-mknod", "sh", "-c", &hide]);
    let output = command.output().expect("unshare runs");
    let said = text(&output.stdout);
    assert!(output.status.code() == Some(1) && said.contains("modprobe tun"), "{said}");
}

#[test]
fn what_is_switched_off_is_shown_as_switched_off_and_a_wrong_word_is_refused() {
    let Some(place) = Place::new("ds", &[]) else { return };
    let run = |list: &str| {
        let mut command = place.command(FV);
        command.args(["doctor", "--json"]).env("FV_NO_OFFLOAD", list).output().expect("fv runs")
    };
    let findings = &json(&run("tun,udp-gso"))["findings"];
    for (what, state) in [
        ("switches", "off"),
        ("TCP super-packets", "off"),
        ("joined writes", "off"),
        ("UDP_SEGMENT", "off"),
        ("virtio header", "ok"),
    ] {
        assert_eq!(find(findings, what)["state"], state, "{what}");
    }
    let output = run("tso");
    assert!(
        output.status.code() == Some(1) && text(&output.stderr).contains("is no offload; known: tun, "),
        "{output:?}"
    );
}

#[test]
fn an_interface_that_nobody_serves_cannot_be_asked() {
    let output = fv(&["doctor", "fvnosuch0"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.starts_with("fv: fvnosuch0: ") && output.stdout.is_empty(), "{said}");
}

#[test]
fn a_mistyped_command_makes_no_interface_and_is_asked_about() {
    for (typed, meant) in [("genky", "genkey"), ("shwo", "show"), ("docter", "doctor"), ("pubkye", "pubkey")]
    {
        for args in [&[typed][..], &["-f", typed]] {
            let output = fv(args);
            let said = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{said}");
            assert!(said.contains(&format!("did you mean `fv {meant}`?")), "{said}");
            assert!(said.contains(&format!("`fv -f -- {typed}`")), "{said}");
        }
    }
    assert!(!std::fs::read_to_string("/proc/net/dev").expect("there").contains("genky"));
}

#[test]
fn a_name_close_to_a_command_is_an_interface_when_that_is_said_or_when_it_is_there() {
    let Some(place) = Place::new("dm", &[]) else { return };
    // (Not `-f`: each goes on in the background, and ends with its interface.)
    for (args, environment) in
        [(&["--", "gemkey"][..], None), (&["gemkey"], Some(("WG_QUICK_USERSPACE_IMPLEMENTATION", "fv")))]
    {
        let mut command = place.command(FV);
        let output = command.args(args).envs(environment).output().expect("fv runs");
        assert!(output.status.success(), "{}", text(&output.stderr));
        place.run(&["ip", "link", "delete", "gemkey"]);
        let socket = std::path::Path::new("/var/run/wireguard/gemkey.sock");
        assert!(crate::place::within(5, || !socket.exists()), "it stays");
    }
    place.run(&["ip", "tuntap", "add", "gemkey", "mode", "tun"]);
    let output = place.command(FV).arg("gemkey").output().expect("fv runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    place.run(&["ip", "link", "delete", "gemkey"]);
}
