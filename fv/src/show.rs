//! `fv show`: asks the control sockets of running tunnels (ours or any other that speaks UAPI) and prints what
//! they say, for people or for programs. Secrets are never printed.

use std::cmp::Reverse;
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, SystemTime};

use forestvpn_quantum::config::{DeviceSnapshot, PeerSnapshot};
use serde::Serialize;
use zeroize::Zeroizing;

use crate::control;
use crate::key::public_text;
use crate::uapi;

const PATIENCE: Duration = Duration::from_secs(5);
const HIDDEN: &str = "(hidden)";

/// Prints one interface, or all that have a control socket in `directory`.
///
/// # Errors
/// One sentence that says what to do.
pub(crate) fn run(directory: &Path, ifname: Option<&str>, json: bool) -> Result<(), String> {
    let devices = match ifname {
        Some(name) => vec![(name.to_owned(), ask(directory, name)?)],
        None => names(directory)?
            .into_iter()
            .map(|name| ask(directory, &name).map(|device| (name, device)))
            .collect::<Result<_, _>>()?,
    };
    let text = if json { as_json(&devices)? } else { as_text(&devices, now()) };
    match io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(format!("cannot write: {e}")),
        _ => Ok(()),
    }
}

/// Names of the sockets that somebody serves; those of killed processes are passed over.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>, String> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(format!("cannot look into {}: {e}", directory.display())),
    };
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".sock").map(str::to_owned))
        .filter(|name| {
            let connected = UnixStream::connect(control::path_in(directory, name));
            !connected.is_err_and(|e| {
                matches!(e.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
            })
        })
        .collect();
    names.sort();
    Ok(names)
}

/// What the control socket of `name` in `directory` says about its tunnel.
///
/// # Errors
/// One sentence that says what to do.
pub(crate) fn ask(directory: &Path, name: &str) -> Result<DeviceSnapshot, String> {
    let answer = exchange(directory, name, "get=1")?;
    uapi::parse_get(&answer, &control::scope).map_err(|e| format!("{name}: {e}"))
}

/// What the control socket of `name` in `directory` answers to a request of one line; empty when it only closes.
///
/// # Errors
/// One sentence that says what to do.
pub(crate) fn exchange(directory: &Path, name: &str, request: &str) -> Result<Zeroizing<String>, String> {
    let path = control::path_in(directory, name);
    talk(&path, request).map_err(|e| {
        let (kind, path) = (e.kind(), path.display());
        if matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) {
            format!("{name}: no tunnel of this name runs in user space here ({path}: {e})")
        } else if kind == io::ErrorKind::PermissionDenied {
            format!("{name}: may not open {path}; run as root")
        } else {
            format!("{name}: no answer on {path}: {e}")
        }
    })
}

fn talk(path: &Path, request: &str) -> io::Result<Zeroizing<String>> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{request}\n\n").as_bytes())?;
    // Only one request is coming: the other side closes after its answer instead of waiting for another.
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = Zeroizing::new(String::with_capacity(1 << 16));
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn as_text(devices: &[(String, DeviceSnapshot)], now: Duration) -> String {
    if devices.is_empty() {
        return "no tunnel runs in user space here\n".into();
    }
    let parts: Vec<_> = devices.iter().map(|(name, device)| device_text(name, device, now)).collect();
    parts.join("\n")
}

/// The lines of `wg show`.
fn device_text(name: &str, device: &DeviceSnapshot, now: Duration) -> String {
    let mut out = format!("interface: {name}\n");
    let mut line = |key: &str, value: &str| {
        let _ = writeln!(out, "  {key}: {value}");
    };
    if let Some(key) = &device.private_key {
        line("public key", &public_text(&key.public_key()));
        line("private key", HIDDEN);
    }
    if device.listen_port != 0 {
        line("listening port", &device.listen_port.to_string());
    }
    if device.fwmark != 0 {
        line("fwmark", &format!("{:#x}", device.fwmark));
    }
    let mut peers: Vec<_> = device.peers.iter().collect();
    peers.sort_by_key(|peer| Reverse(peer.last_handshake));
    for peer in peers {
        peer_text(&mut out, peer, now);
    }
    out
}

fn peer_text(out: &mut String, peer: &PeerSnapshot, now: Duration) {
    let _ = writeln!(out, "\npeer: {}", public_text(&peer.public_key));
    let mut line = |key: &str, value: &str| {
        let _ = writeln!(out, "  {key}: {value}");
    };
    if peer.preshared_key.is_some() {
        line("preshared key", HIDDEN);
    }
    if let Some(endpoint) = peer.endpoint {
        line("endpoint", &endpoint.to_string());
    }
    let nets: Vec<_> = peer.allowed_ips.iter().map(ToString::to_string).collect();
    line("allowed ips", if nets.is_empty() { "(none)".into() } else { nets.join(", ") }.as_str());
    if let Some(then) = peer.last_handshake {
        line("latest handshake", &ago(now, then));
    }
    if peer.rx_bytes != 0 || peer.tx_bytes != 0 {
        line("transfer", &format!("{} received, {} sent", size(peer.rx_bytes), size(peer.tx_bytes)));
    }
    if peer.persistent_keepalive != 0 {
        line("persistent keepalive", &format!("every {}", span(peer.persistent_keepalive.into())));
    }
}

fn ago(now: Duration, then: Duration) -> String {
    match now.as_secs().checked_sub(then.as_secs()) {
        Some(0) => "now".into(),
        Some(seconds) => format!("{} ago", span(seconds)),
        None => "in the future: this machine's clock was set back".into(),
    }
}

/// Seconds as the numbers people count in, without those that are zero.
pub(crate) fn span(seconds: u64) -> String {
    let units = [
        (seconds / 31_536_000, "year"),
        (seconds / 86_400 % 365, "day"),
        (seconds / 3600 % 24, "hour"),
        (seconds / 60 % 60, "minute"),
        (seconds % 60, "second"),
    ];
    let parts: Vec<_> = units
        .iter()
        .filter(|(count, _)| *count != 0)
        .map(|(count, unit)| format!("{count} {unit}{}", if *count == 1 { "" } else { "s" }))
        .collect();
    parts.join(", ")
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = UNITS.iter();
    let mut unit = units.next();
    while value >= 1024.0
        && let Some(next) = units.next()
    {
        value /= 1024.0;
        unit = Some(next);
    }
    format!("{value:.2} {}", unit.unwrap_or(&"KiB"))
}

/// The JSON of one interface. These names are kept.
#[derive(Serialize)]
struct InterfaceJson<'a> {
    interface: &'a str,
    public_key: Option<String>,
    /// `"(hidden)"`, or null when there is none.
    private_key: Option<&'a str>,
    listen_port: u16,
    /// 0 is off.
    fwmark: u32,
    peers: Vec<PeerJson<'a>>,
}

#[derive(Serialize)]
struct PeerJson<'a> {
    public_key: String,
    /// `"(hidden)"`, or null when there is none.
    preshared_key: Option<&'a str>,
    endpoint: Option<String>,
    allowed_ips: Vec<String>,
    /// Seconds since 1970, null when there was none.
    latest_handshake: Option<u64>,
    rx_bytes: u64,
    tx_bytes: u64,
    /// Seconds, 0 is off.
    persistent_keepalive: u16,
}

fn as_json(devices: &[(String, DeviceSnapshot)]) -> Result<String, String> {
    let all: Vec<_> = devices
        .iter()
        .map(|(name, device)| InterfaceJson {
            interface: name,
            public_key: device.private_key.as_ref().map(|key| public_text(&key.public_key())),
            private_key: device.private_key.as_ref().map(|_| HIDDEN),
            listen_port: device.listen_port,
            fwmark: device.fwmark,
            peers: device.peers.iter().map(peer_json).collect(),
        })
        .collect();
    serde_json::to_string_pretty(&all).map(|text| text + "\n").map_err(|e| e.to_string())
}

fn peer_json(peer: &PeerSnapshot) -> PeerJson<'static> {
    PeerJson {
        public_key: public_text(&peer.public_key),
        preshared_key: peer.preshared_key.as_ref().map(|_| HIDDEN),
        endpoint: peer.endpoint.map(|endpoint| endpoint.to_string()),
        allowed_ips: peer.allowed_ips.iter().map(ToString::to_string).collect(),
        latest_handshake: peer.last_handshake.map(|time| time.as_secs()),
        rx_bytes: peer.rx_bytes,
        tx_bytes: peer.tx_bytes,
        persistent_keepalive: peer.persistent_keepalive,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use forestvpn_quantum::{PresharedKey, PrivateKey, PublicKey};

    const PRIVATE: &str = "AKeZaHwBxjiKLFnkY2unvEdOTtg4AL+M9dQXfopFVFk=";
    const PUBLIC: &str = "Igge9KzRytKNwrgkzDE/8hrLu6Ly0OqVdvOPWhA5KR4=";
    const PSK: &str = "iIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIg=";

    fn peer(first: u8) -> PeerSnapshot {
        PeerSnapshot {
            public_key: PublicKey([first; 32]),
            preshared_key: None,
            endpoint: None,
            last_handshake: None,
            tx_bytes: 0,
            rx_bytes: 0,
            persistent_keepalive: 0,
            allowed_ips: Vec::new(),
        }
    }

    fn device() -> DeviceSnapshot {
        let secret = |text| *crate::key::from_base64(text).expect("a key");
        DeviceSnapshot {
            private_key: Some(PrivateKey::new(secret(PRIVATE))),
            listen_port: 51820,
            fwmark: 0xca6c,
            peers: vec![
                peer(0),
                PeerSnapshot {
                    preshared_key: Some(PresharedKey::new(secret(PSK))),
                    endpoint: Some("[2001:db8::1]:5".parse().expect("an endpoint")),
                    last_handshake: Some(Duration::from_secs(1000)),
                    tx_bytes: 1023,
                    rx_bytes: 5 << 20,
                    persistent_keepalive: 65,
                    allowed_ips: vec!["10.0.0.0/8".parse().expect("a net"), "::/0".parse().expect("a net")],
                    ..peer(4)
                },
            ],
        }
    }

    #[test]
    fn people_see_what_wg_show_would_tell_them_the_busiest_peer_first() {
        let text = as_text(&[("wg0".into(), device())], Duration::from_secs(1000 + 86_400 + 61));
        assert_eq!(
            text,
            format!(
                "interface: wg0\n  public key: {PUBLIC}\n  private key: (hidden)\n  listening port: 51820\n  \
                 fwmark: 0xca6c\n\n\
                 peer: BAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQ=\n  preshared key: (hidden)\n  \
                 endpoint: [2001:db8::1]:5\n  allowed ips: 10.0.0.0/8, ::/0\n  \
                 latest handshake: 1 day, 1 minute, 1 second ago\n  \
                 transfer: 5.00 MiB received, 1023 B sent\n  persistent keepalive: every 1 minute, 5 seconds\n\n\
                 peer: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n  allowed ips: (none)\n"
            )
        );
    }

    #[test]
    fn programs_see_stable_names_and_no_secret() {
        let text = as_json(&[("wg0".into(), device())]).expect("JSON");
        assert!(!text.contains(PRIVATE) && !text.contains(PSK));
        let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(json[0]["interface"], "wg0");
        assert_eq!(json[0]["public_key"], PUBLIC);
        assert_eq!(json[0]["private_key"], "(hidden)");
        assert_eq!(json[0]["fwmark"], 0xca6c);
        assert_eq!(json[0]["peers"][0]["latest_handshake"], serde_json::Value::Null);
        let peer = &json[0]["peers"][1];
        assert_eq!(peer["preshared_key"], "(hidden)");
        assert_eq!((&peer["latest_handshake"], &peer["rx_bytes"]), (&1000.into(), &(5 << 20).into()));
        assert_eq!(peer["allowed_ips"][1], "::/0");
    }

    #[test]
    fn ages_and_sizes_are_in_units_that_fit() {
        let second = Duration::from_secs;
        assert_eq!(ago(second(5), second(5)), "now");
        assert_eq!(ago(second(4), second(5)), "in the future: this machine's clock was set back");
        assert_eq!(span(31_536_000 + 3600), "1 year, 1 hour");
        assert_eq!((size(1024).as_str(), size(1 << 40).as_str()), ("1.00 KiB", "1.00 TiB"));
        assert_eq!(size(u64::MAX), "16777216.00 TiB");
    }

    #[test]
    fn an_interface_that_nobody_serves_is_an_error_and_a_stale_socket_is_passed_over() {
        let directory = tempfile::tempdir().expect("a directory");
        drop(UnixListener::bind(control::path_in(directory.path(), "wg7")).expect("bound"));
        let error = run(directory.path(), Some("wg7"), false).expect_err("stale");
        assert!(error.starts_with("wg7: no tunnel of this name runs in user space here"), "{error}");
        assert_eq!(names(directory.path()), Ok(Vec::new()));
        assert_eq!(names(&directory.path().join("none")), Ok(Vec::new()));
    }
}
