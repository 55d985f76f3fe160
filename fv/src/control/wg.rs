//! The real `wg` against the control socket, with a device that only remembers: what it prints is right when
//! it cannot tell the socket from a kernel interface. Needs root, since `wg` looks in one fixed directory.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::fake::{BUSY_PORT, Fake};
use super::{ControlServer, ControlSocket, DIRECTORY};

const PRIVATE: &str = "AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=";
const PUBLIC: &str = "Igge9KzRytKNwrgkzDE/8hrLu6Ly0OqVdvOPWhA5KR4=";
const PEER: &str = "YDCttCs9e1J52/g9vEnwJJa+2x6RqaayAYMpSVQfGEY=";
const OTHER: &str = "TrMvSoP4jYQlY6RIzBgbssQqY3vxI2Pi+y71lOWWXX0=";
const PSK: &str = "iIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIg=";

/// An interface that is not there, with a control socket that is.
struct Interface {
    name: String,
    _server: ControlServer,
}

impl Interface {
    /// Says why it is not to be had here, or fails when skipping is forbidden.
    fn new(name: &str) -> Option<Self> {
        let wg = Command::new("wg").arg("--version").output().is_ok();
        if !wg || !nix::unistd::geteuid().is_root() {
            let reason = if wg { "not root" } else { "no wg (package wireguard-tools)" };
            assert!(std::env::var_os("FV_NO_SKIP").is_none(), "cannot run: {reason}");
            println!("skipped: {reason}");
            return None;
        }
        let name = format!("{name}{}", std::process::id());
        let socket = ControlSocket::open(Path::new(DIRECTORY), &name).expect("a socket");
        let server = socket.serve(Arc::new(Fake::default()), || {}).expect("a thread");
        Some(Self { name, _server: server })
    }

    fn run(&self, args: &[&str], input: &str) -> Result<String, String> {
        let args: Vec<_> = args.iter().map(|arg| if *arg == "IF" { &self.name } else { *arg }).collect();
        let mut child = Command::new("wg")
            .args(args)
            .env("WG_HIDE_KEYS", "never")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("wg runs");
        child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("wg reads");
        let output = child.wait_with_output().expect("wg ends");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    fn wg(&self, args: &[&str], input: &str) -> String {
        self.run(args, input).unwrap_or_else(|error| panic!("wg {args:?}: {error}"))
    }

    fn dump(&self) -> String {
        self.wg(&["show", "IF", "dump"], "")
    }
}

fn full_config() -> String {
    format!(
        "[Interface]\nListenPort = 51820\nFwMark = 0xca6c\nPrivateKey = {PRIVATE}\n\n\
         [Peer]\nPublicKey = {PEER}\nPresharedKey = {PSK}\nAllowedIPs = 10.0.0.0/8, fd00::/64\n\
         Endpoint = 192.0.2.1:51821\nPersistentKeepalive = 25\n\n\
         [Peer]\nPublicKey = {OTHER}\nEndpoint = [2001:db8::1]:5\n"
    )
}

#[test]
fn an_interface_without_configuration_shows_nothing_but_none_and_off() {
    let Some(interface) = Interface::new("fvxa") else { return };
    assert_eq!(interface.dump(), "(none)\t(none)\t0\toff\n");
    assert_eq!(interface.wg(&["showconf", "IF"], "").trim(), "[Interface]");
    assert!(interface.wg(&["show", "interfaces"], "").split_whitespace().any(|name| name == interface.name));
}

#[test]
fn setconf_then_showconf_and_dump_give_back_the_same_configuration() {
    let Some(interface) = Interface::new("fvxb") else { return };
    interface.wg(&["setconf", "IF", "/dev/stdin"], &full_config());
    assert_eq!(interface.wg(&["showconf", "IF"], "").trim(), full_config().trim());
    assert_eq!(
        interface.dump(),
        format!(
            "{PRIVATE}\t{PUBLIC}\t51820\t0xca6c\n\
             {PEER}\t{PSK}\t192.0.2.1:51821\t10.0.0.0/8,fd00::/64\t0\t0\t0\t25\n\
             {OTHER}\t(none)\t[2001:db8::1]:5\t(none)\t0\t0\t0\toff\n"
        )
    );
    let shown = interface.wg(&["show", "IF"], "");
    for part in [
        &format!("public key: {PUBLIC}"),
        "listening port: 51820",
        "fwmark: 0xca6c",
        "allowed ips: 10.0.0.0/8, fd00::/64",
        "persistent keepalive: every 25 seconds",
        "allowed ips: (none)",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn an_empty_setconf_takes_everything_away() {
    let Some(interface) = Interface::new("fvxc") else { return };
    interface.wg(&["setconf", "IF", "/dev/stdin"], &full_config());
    interface.wg(&["setconf", "IF", "/dev/stdin"], &format!("[Interface]\n[Peer]\nPublicKey = {PEER}\n"));
    assert_eq!(
        interface.dump(),
        format!("(none)\t(none)\t40000\toff\n{PEER}\t(none)\t(none)\t(none)\t0\t0\t0\toff\n")
    );
}

#[test]
fn addconf_adds_and_syncconf_brings_to_the_file_without_touching_the_rest() {
    let Some(interface) = Interface::new("fvxd") else { return };
    interface.wg(&["setconf", "IF", "/dev/stdin"], &full_config());
    let third = format!("[Peer]\nPublicKey = {PUBLIC}\nAllowedIPs = 10.0.0.0/8\n");
    interface.wg(&["addconf", "IF", "/dev/stdin"], &third);
    let moved = interface.wg(&["show", "IF", "allowed-ips"], "");
    assert_eq!(moved, format!("{PEER}\tfd00::/64\n{OTHER}\t(none)\n{PUBLIC}\t10.0.0.0/8\n"));
    interface.wg(&["syncconf", "IF", "/dev/stdin"], &full_config());
    assert_eq!(interface.wg(&["show", "IF", "peers"], ""), format!("{PEER}\n{OTHER}\n"));
    assert_eq!(
        interface.wg(&["show", "IF", "preshared-keys"], ""),
        format!("{PEER}\t{PSK}\n{OTHER}\t(none)\n")
    );
}

#[test]
fn set_changes_one_thing_at_a_time() {
    let Some(interface) = Interface::new("fvxe") else { return };
    interface.wg(&["set", "IF", "private-key", "/dev/stdin", "listen-port", "7", "fwmark", "0x10"], PRIVATE);
    interface.wg(
        &["set", "IF", "peer", PEER, "allowed-ips", "10.1.2.3/16,::1/0", "endpoint", "[::ffff:192.0.2.9]:9"],
        "",
    );
    interface
        .wg(&["set", "IF", "peer", PEER, "persistent-keepalive", "9", "preshared-key", "/dev/stdin"], PSK);
    assert_eq!(
        interface.dump(),
        format!("{PRIVATE}\t{PUBLIC}\t7\t0x10\n{PEER}\t{PSK}\t192.0.2.9:9\t10.1.0.0/16,::/0\t0\t0\t0\t9\n")
    );
    interface
        .wg(&["set", "IF", "private-key", "/dev/null", "fwmark", "off", "peer", PEER, "allowed-ips", ""], "");
    interface
        .wg(&["set", "IF", "peer", PEER, "persistent-keepalive", "off", "preshared-key", "/dev/null"], "");
    assert_eq!(
        interface.dump(),
        format!("(none)\t(none)\t7\toff\n{PEER}\t(none)\t192.0.2.9:9\t(none)\t0\t0\t0\toff\n")
    );
    interface.wg(&["set", "IF", "peer", OTHER, "remove", "peer", PEER, "remove"], "");
    assert_eq!(interface.dump(), "(none)\t(none)\t7\toff\n");
}

//@test C-PRIM-5
#[test]
fn a_private_key_is_read_back_clamped() {
    let Some(interface) = Interface::new("fvxh") else { return };
    // 0xff and 0xff at the ends become 0xf8 and 0x7f.
    let (given, clamped) = (format!("{}8=", "/".repeat(42)), format!("+P{}38=", "/".repeat(39)));
    interface.wg(&["set", "IF", "private-key", "/dev/stdin"], &given);
    let shown = interface.wg(&["show", "IF", "private-key"], "");
    assert_eq!(shown.trim(), clamped);
}

#[test]
fn a_refused_change_is_told_in_words_that_wg_knows() {
    let Some(interface) = Interface::new("fvxf") else { return };
    let error = interface.run(&["set", "IF", "listen-port", &BUSY_PORT.to_string()], "").expect_err("in use");
    assert!(error.contains("Address already in use"), "{error}");
}

#[test]
fn thousands_of_allowed_ips_pass_both_ways() {
    let Some(interface) = Interface::new("fvxg") else { return };
    let mut config = format!("[Interface]\n[Peer]\nPublicKey = {PEER}\n");
    for a in 1..=255 {
        for b in 0..=255 {
            config.push_str(&format!("AllowedIPs = {a}.{b}.0.0/16, {a:x}{b:02x}::/128\n"));
        }
    }
    interface.wg(&["setconf", "IF", "/dev/stdin"], &config);
    assert_eq!(
        interface.wg(&["show", "IF", "allowed-ips"], "").split_whitespace().count(),
        255 * 256 * 2 + 1
    );
}
