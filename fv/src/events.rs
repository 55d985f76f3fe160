//! What the datapath thread has to tell becomes log lines here, on a thread of its own. Started by `tunnel`.

use std::io;
use std::sync::mpsc::Receiver;
use std::thread;

use forestvpn_quantum::{Event, GivenUp, PublicKey};
use log::Level;
use nix::errno::Errno;

use crate::key::public_text;

/// Logs `events` until the worker has ended.
///
/// # Errors
/// When the system gives no thread.
pub(crate) fn log_all(events: Receiver<(Event, Option<PublicKey>)>) -> io::Result<()> {
    thread::Builder::new().name("events".to_owned()).spawn(move || {
        for (event, peer) in events {
            if let Some((level, line)) = line(event, peer) {
                log::log!(level, "{line}");
            }
        }
    })?;
    Ok(())
}

/// `None`: an event that is not known here.
fn line(event: Event, peer: Option<PublicKey>) -> Option<(Level, String)> {
    let peer = peer.map_or_else(|| "a peer that was removed".to_owned(), |key| public_text(&key));
    Some(match event {
        Event::OffloadGivenUp(what) => given_up(what)?,
        Event::SessionEstablished(_) => (Level::Debug, format!("{peer}: handshake done")),
        Event::HandshakeFailed(_) => {
            (Level::Debug, format!("{peer}: no answer to twenty handshakes; waiting for something to send"))
        }
        Event::EndpointChanged(_) => (Level::Debug, format!("{peer}: heard at a new address")),
        Event::SessionExpired(_) => {
            (Level::Debug, format!("{peer}: keys wiped, no handshake for nine minutes"))
        }
        _ => return None,
    })
}

fn given_up(what: GivenUp) -> Option<(Level, String)> {
    let why = |errno| Errno::from_raw(errno).desc();
    Some(match what {
        GivenUp::Segmentation { errno } => (
            Level::Warn,
            format!(
                "UDP_SEGMENT is given up ({}): the device on the way out has no checksum offload. Nothing is lost, sending takes more CPU. `ethtool -K DEVICE tx on` may help; it is tried \
                 again when the interface was down, or the port is another",
                why(errno)
            ),
        ),
        GivenUp::SegmentationTowards { remote, errno } => (
            Level::Info,
            format!(
                "UDP_SEGMENT is given up towards {remote} ({}): its path takes smaller packets than ours. Nothing is \
                 lost; a smaller MTU of the tunnel avoids it",
                why(errno)
            ),
        ),
        GivenUp::JoinedWrites { errno } => (
            Level::Warn,
            format!(
                "joined writes to the interface are given up ({}): a fault of this kernel (6.6.44 and 6.1.x, 6.10.x of \
                 mid-2024 have one). Nothing is lost, receiving takes more CPU",
                why(errno)
            ),
        ),
        GivenUp::JoinedDatagrams { errno } => (
            Level::Warn,
            format!(
                "joined writes of UDP to the interface are given up ({}). Nothing is lost, receiving UDP takes more CPU",
                why(errno)
            ),
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_is_a_line_with_the_cause_and_a_single_path_is_no_warning() {
        let remote = "192.0.2.1:5".parse().expect("an address");
        for (what, level, parts) in [
            (GivenUp::Segmentation { errno: 5 }, Level::Warn, ["UDP_SEGMENT", "ethtool"]),
            (
                GivenUp::SegmentationTowards { remote, errno: 22 },
                Level::Info,
                ["192.0.2.1:5", "Invalid argument"],
            ),
            (GivenUp::JoinedWrites { errno: 22 }, Level::Warn, ["joined writes", "Invalid argument"]),
            (GivenUp::JoinedDatagrams { errno: 22 }, Level::Warn, ["UDP", "Invalid argument"]),
        ] {
            let (found, text) = line(Event::OffloadGivenUp(what), None).expect("known");
            assert_eq!(found, level, "{text}");
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}
